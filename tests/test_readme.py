"""What the README and the pages in docs/ show works."""

import dataclasses
import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import torch

from bench.report import DOCS, HEADLINES, MARKED, RESULTS, pages, section_of, with_tables
from tests.launcher import ROOT, run_script
from train.loop.stages import parse_run
from train.settings.config import TrainConfig

README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]


def blocks(path, language):
    """The contents of a page's blocks of code in a language."""
    return re.findall(rf"```{language}\n(.*?)```", path.read_text(), re.DOTALL)


def without_code(path):
    """A page's text without blocks of Python."""
    return re.sub(r"```python\n.*?```", "", path.read_text(), flags=re.DOTALL)


def commands(path, after):
    """The commands of the first block of bash after a heading, a line each."""
    section = path.read_text().split(f"{after}\n")[1]
    return re.search(r"```bash\n(.*?)```", section, re.DOTALL)[1].replace("\\\n", " ").splitlines()


FILES = r"(instances\.jsonl|vocabulary\.txt|corpus\.jsonl|more_text/|data/|runs/|exported\b)"


def run_command(line: str, folder: Path, *more: str, ranks: int | None = None) -> str:
    """Run a page's command with its files in a folder, and with more arguments. Return its
    output.
    """
    there = re.sub(rf"\b{FILES}", rf"{folder}/\1", line)
    python, script, *arguments = shlex.split(there, comments=True)
    # test_interrupts.py has runs whose ranks are started by pretrain.py itself
    ranks = 2 if "--processes 2" in line else ranks
    code, printed = run_script(ranks, script, *arguments, *more, draws=True)
    assert (python, code) == ("python", 0), line + printed
    return printed


def test_the_simulated_example_prints_rounding():
    [code] = blocks(README, "python")
    printed = []
    names = {"print": printed.append}
    exec(code, names)
    [difference] = printed
    assert isinstance(difference, torch.Tensor)
    assert 0 <= difference < 1e-5
    inputs = [names[name].requires_grad_() for name in "qkv"]
    grads = torch.autograd.grad(
        names["burst_attn_func"](*inputs, mask=names["mask"]).sin().sum(), inputs
    )
    names["layout"].unshard(names["simulate"](3, names["work"])).sin().sum().backward()
    for x, grad in zip(inputs, grads, strict=True):
        assert (x.grad - grad).abs().max() < 1e-4 * grad.abs().max()


ALONE = "sp = SequenceParallel()"


def test_the_scripts_compute_what_one_rank_would(tmp_path):
    [code] = [x for x in blocks(ROOT / "docs/attention.md", "python") if x.startswith("# torchrun")]
    assert code.startswith("# torchrun --nproc-per-node 2 script.py\n")
    check = """
layout, mask = batch.layout, batch.mask
parts = [None] * sp.size
dist.all_gather_object(parts, out.detach())
alone = nn.BurstAttention(128, 4, num_kv_heads=2)
alone.load_state_dict(attention.state_dict())
whole = torch.arange(1001).unsqueeze(0) % 320
tables = nn.rope_tables(mask.positions(), alone.head_dim)
assert (alone(embedding(whole), *tables, mask=mask) - layout.unshard(parts)).abs().max() < 1e-5
texts = [labels] * sp.size
dist.all_gather_object(texts, labels)
expected = whole.roll(-1)
expected[:, [399, 649, 1000]] = -100
assert layout.unshard(texts).equal(expected)
"""
    chunks, generation = (blocks(ROOT / f"docs/{x}.md", "python") for x in ("chunks", "generation"))
    assert ALONE in chunks[0] and ALONE in generation[0]
    check += f"""
def run(code, sp):
    names = {{"given": sp}}
    exec(code.replace("{ALONE}", "sp = given"), names)
    return names


from bmt_burst import SequenceParallel
for code in ({chunks[0]!r}, {generation[0]!r}):
    shared, alone = run(code, sp), run(code, SequenceParallel())
    if "tokens" in shared:
        assert shared["tokens"].shape == (1, 5) and shared["tokens"].equal(alone["tokens"])
        continue
    weights = [x["attention"].parameters() for x in (shared, alone)]
    for one, other in zip(*weights, strict=True):
        dist.all_reduce(one.grad)
        assert (one.grad - other.grad).abs().max() < 1e-4 * other.grad.abs().max()
dist.barrier()
__import__("os")._exit(0)  # torch 2.13: a gloo thread may abort an interpreter that shuts down
"""
    script = tmp_path / "script.py"
    script.write_text(code + check)
    code, printed = run_script(2, script)
    assert code == 0, printed


def test_the_examples_of_the_pages_run():
    # tests with their names run the blocks of these pages, one file each
    files = "silent-errors.md", "own-trainer.md", "own-model.md"
    others = [path for path in PAGES[1:] if path.name not in files]
    examples = [code for path in others for code in blocks(path, "python")]
    # test_migrate.py runs the others
    alone = [code for code in examples if not code.startswith("# torchrun")]
    assert alone
    for code in alone:
        exec(code, {})


def test_what_is_generated_is_what_the_results_say():
    readme, texts = README.read_text(), pages()
    assert with_tables(readme) == readme
    assert len(MARKED.findall(readme)) == readme.count("<!-- results:") == readme.count("<!-- end")
    for name, text in texts.items():
        assert (DOCS / name).read_text() == text, "python bench/report.py --readme writes it anew"
    assert len(texts["results.md"].splitlines()) <= 200
    whole = "\n".join(texts.values())
    stems = {file.stem for file in RESULTS.glob("*.jsonl")}
    assert stems >= {*HEADLINES}
    assert all(whole.count(f"`{stem}.jsonl`") == 1 for stem in stems)
    for folder, written in ((DOCS, whole), (ROOT, readme)):
        plots = re.findall(r"!\[.*?\]\((.*?)\)", written)
        assert all((folder / plot).read_text().count("<svg") == 1 for plot in plots)
    lines = "\n".join([whole, *(m[0] for m in MARKED.finditer(readme))]).splitlines()
    assert not [x for x in lines if len(x) > 100 and not x.startswith(("| ", "!["))]
    with pytest.raises(ValueError, match=r"fits one of .*, got guessed-8\.jsonl"):
        section_of(RESULTS / "guessed-8.jsonl")


def test_peers_are_compared_as_on_their_page_and_our_largest_model_was_measured():
    page, readme = ((ROOT / path).read_text() for path in ("docs/peers.md", "README.md"))
    table = readme.split("## Compared with its peers\n\n")[1].split("\n\n")[0].splitlines()
    assert len(table) == 2 + 4
    assert set(table) <= set(page.splitlines())
    rows = [json.loads(x) for x in (RESULTS / "training-8-nvidia-h200.jsonl").open()]
    longest = max(rows, key=lambda row: row["seq_len"])
    assert "| largest whole model published | 8B, 1M tokens, 8 H200 |" in page
    assert (longest["model"], longest["layers"]) == ("minicpm4-8b", 32)
    assert (longest["seq_len"], longest["gpus"]) == (1 << 20, 8)


def test_every_link_leads_somewhere():
    for path in PAGES:
        for link in re.findall(r"\]\((?!https?:)([^)]+)\)", without_code(path)):
            name, _, anchor = link.partition("#")
            target = path.parent / name if name else path
            assert target.is_file(), f"{path.name}: {link}"
            headings = re.findall(r"^#+ (.*)", target.read_text(), re.MULTILINE)
            anchors = ["", *(heading.lower().replace(" ", "-") for heading in headings)]
            assert anchor in anchors, f"{path.name}: {link}"


FOLDERS = "bmt_burst|models|train|bench|examples|tests|docs"


def test_every_file_they_name_is_there():
    for path in PAGES:
        text = without_code(path)
        names = set(re.findall(rf"\b(?:{FOLDERS})/[\w/.-]*\w", text))
        assert not [name for name in names if not (ROOT / name).exists()], path.name
    [tree] = re.findall(r"\n\n```\n(.*?)```", README.read_text(), re.DOTALL)
    for line in tree.splitlines():
        [name] = re.findall(r"^ *(\w+/)", line)
        if not line.startswith(" "):
            top = ROOT / name
        folder = top / name if line.startswith(" ") else top
        assert folder.is_dir(), line
        assert all((folder / file).exists() for file in re.findall(r"[\w/]+\.py", line)), line


# Options of torchrun, Slurm, Docker, tensorboard, install_gpu.sh and, up to an underscore, lm-eval.
OTHERS = """--nodes --ntasks-per-node --gpus-per-node --nnodes --nproc-per-node --rdzv-backend
--rdzv-endpoint --max-restarts --logdir --from --signal --time --shutdown-timeout --batch
--metadata --kill-on-bad-exit --job-name --open-mode --cpus-per-task --mem --requeue --rdzv-id
--parsable --dependency --gpus --network --ipc --ulimit --container-image --container-mounts
--container-workdir"""


def pages_of_pretraining() -> list[Path]:
    nav = re.search(r"- Pretraining:\n((?: {6}- .*\n)+)", (ROOT / "mkdocs.yml").read_text())[1]
    return [ROOT / "docs" / name for name in re.findall(r"[\w-]+\.md", nav)]


def test_every_option_of_pretraining_that_they_name_is_one():
    scripts = ("prepare_data", "export", "generate", "make_vocabulary", "evaluate")
    texts = [(ROOT / f"train/{name}.py").read_text() for name in scripts]
    texts.append((ROOT / "train/data/find.py").read_text())
    ours = set(re.findall(r"\"(--[a-z-]+)\"", "".join(texts)))
    ours |= {"--config", "--help", "--stages", "--dry-run"}
    for field in dataclasses.fields(TrainConfig):
        name = field.name.replace("_", "-")
        ours |= {f"--{name}", f"--no-{name}"} if field.default is True else {f"--{name}"}
    text = "".join(path.read_text() for path in pages_of_pretraining())
    named = set(re.findall(r"--[a-z][a-z0-9-]+", text))
    assert named <= ours | set(OTHERS.split())
    assert named >= {"--resume", "--val-fraction", "--keep-scalings", "--nnodes"}


def test_pretrain_reads_every_command_that_they_show():
    scripts = "\n".join(code for path in pages_of_pretraining() for code in blocks(path, "bash"))
    lines = re.findall(r"train/pretrain\.py (.*)", scripts.replace("\\\n", " "))
    whole = [line for line in lines if not re.search(r"--config|'$", line)]
    assert len(whole) >= 8
    for line in whole:
        arguments = shlex.split(line.replace("... ", "").removesuffix("..."), comments=True)
        config, _ = parse_run(arguments)
        assert isinstance(config, TrainConfig)


def test_the_scripts_of_the_commands_are_there_and_take_their_options():
    lines = commands(README, "in 40 lines.") + commands(README, "measurements take one:")
    assert [re.findall(r"bash (\S+\.sh)", line) for line in lines] == [
        ["train/quickstart.sh"],
        ["tests/test.sh"],
        ["train/install_gpu.sh", "bench/bench.sh"],
    ]
    for script in re.findall(r"bash (\S+\.sh)", "\n".join(lines)):
        subprocess.run(["bash", "-n", script], cwd=ROOT, check=True)
    assert "--quick)" in (ROOT / "bench/bench.sh").read_text()


@pytest.mark.slow
def test_the_commands_of_pretraining_run_as_they_stand(tmp_path):
    """From a file and a folder of text to a sample and a Hugging Face folder, in fewer steps of
    fewer sequences, and without TensorBoard, which never ends.
    """
    *lines, board = commands(ROOT / "docs/pretraining.md", "# Pretraining")
    assert board.startswith("tensorboard --logdir")
    names = ("prepare_data", "pretrain", "generate", "export")
    assert [line.split()[:2] for line in lines] == [["python", f"train/{x}.py"] for x in names]
    texts = [f"Once there were {i} rings, and {i * i} hops. " * 20 for i in range(300)]
    records = [json.dumps({"text": text}) for text in texts]
    (tmp_path / "corpus.jsonl").write_text("\n".join(records))
    (tmp_path / "more_text").mkdir()
    (tmp_path / "more_text/a.txt").write_text(texts[0])
    assert " --steps 20 " in lines[1]
    lines[1] = lines[1].replace("--steps 20", "--steps 3 --batch-size 2 --eval-sequences 2")
    printed = [run_command(line, tmp_path) for line in lines]
    assert "1 data parallel x 2 sequence parallel ranks" in printed[1]
    assert "\nOnce" in "\n" + printed[2]
    assert (tmp_path / "runs/mine/loss.png").is_file()
    assert list((tmp_path / "runs/mine").glob("tensorboard/events.*"))
    assert list((tmp_path / "exported/mine").glob("*.safetensors"))
