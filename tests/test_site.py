"""The documentation site builds offline and lists everything that is public."""

import importlib.util
import os
import re
import subprocess
import sys

import pytest

import bmt_burst
from tests.launcher import ROOT

OFFLINE = {
    "http_proxy": "http://127.0.0.1:9",
    "https_proxy": "http://127.0.0.1:9",
    "NO_MKDOCS_2_WARNING": "1",
}


def test_the_api_page_lists_every_public_name():
    page = (ROOT / "docs/api.md").read_text()
    listed = set(re.findall(r"^::: bmt_burst\.(\w+)$", page, re.MULTILINE))
    assert set(bmt_burst.__all__) - listed == {"IGNORE_INDEX"}, "docs/api.md"


@pytest.mark.slow
@pytest.mark.skipif(
    not importlib.util.find_spec("material"), reason="mkdocs-material is not installed"
)
def test_the_site_builds_without_network(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path]
    options = {"cwd": ROOT, "env": {**os.environ, **OFFLINE}, "timeout": 300}
    done = subprocess.run(command, capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stderr
    pages = {path.name: path.read_text() for path in tmp_path.glob("*.html")}
    assert {"index.html", "attention.html", "design.html", "api.html"} <= pages.keys()
    assert "When to choose what" in pages["index.html"]
    # the navigation, whose entries docs/hooks.py finds
    for name in ("results-masks.html", "mechanisms.html"):
        assert f'href="{name}"' in pages["design.html"]
    api = re.sub(r"<[^>]+>", "", pages["api.html"])
    assert "burst_attn_func(\n    q: Tensor,\n" in api, "signatures are broken into lines"
    assert 'id="bmt_burst.burst_attn_func"' in pages["api.html"]
    for internal in ("Chunks.take_turn", "Chunks.forget", "Cache.variant"):
        assert f'id="bmt_burst.{internal}"' not in pages["api.html"]
    loaded = (
        r"<(?:script[^>]*src|link[^>]*rel=\"(?:stylesheet|preconnect)\"[^>]*href)=\"(https?:[^\"]*)"
    )
    assert not [re.findall(loaded, page) for page in pages.values() if re.search(loaded, page)]
