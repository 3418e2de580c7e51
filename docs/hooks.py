"""Make the README the home page of the documentation site, so that it is written once."""

from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent


def on_files(files, config):
    """Add index.md: the README, with its links seen from docs/."""
    text = (ROOT / "README.md").read_text().replace("](docs/", "](")
    files.append(File.generated(config, "index.md", content=text))
    return files
