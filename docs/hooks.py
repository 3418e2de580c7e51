"""Make the README the home page of the documentation site, and list the pages of results."""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add each page docs/results-TOPIC.md that exists to the navigation, after results.md."""
    topics = sorted(path.name for path in (ROOT / "docs").glob("results-*.md"))
    for entry in config.nav or ():
        if "Results" in entry:
            first, *others = entry["Results"]
            entry["Results"] = [first, *topics, *others]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add index.md: the README with its links seen from docs/, and without links to files that the
    site lacks.
    """
    text = (ROOT / "README.md").read_text()
    text = re.sub(r"\[([^\]]*)\]\((?!https?:|docs/)([^)]*)\)", r"`\2`", text).replace(
        "](docs/", "]("
    )
    files.append(File.generated(config, "index.md", content=text))
    return files
