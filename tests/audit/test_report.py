"""The report's forms: HTML in a real browser, JSON and SARIF against their schemas, GitHub annotations, the table."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from typer.testing import CliRunner

import normkit
from normkit.audit import Audit, audit
from normkit.audit.load import load
from normkit.audit.report import describe, plan
from normkit.audit.report.grouping import runs
from normkit.audit.report.html import page
from normkit.audit.report.sarif import github, sarif
from normkit.cli import app

SCHEMA = json.loads(files("normkit.audit.report").joinpath("audit.schema.json").read_text())
SARIF = json.loads((Path(__file__).parent.parent / "data" / "sarif-2.1.0.json").read_text())
LLAMA = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3,
         "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 99}  # fmt: skip


@pytest.fixture(scope="module")
def minilm() -> Audit:
    loaded = load("minilm")
    return audit(loaded.model, **loaded.kwargs, data=[loaded.kwargs])


class Faulty(nn.Module):
    """A BatchNorm left in training mode, a misleading name, an inline norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.final_norm = nn.Linear(6, 6), nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.final_norm(self.first(x))
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


@pytest.fixture(scope="module")
def faulty() -> Audit:
    model = Faulty().eval()
    model.final_norm.train()
    return audit(model, torch.randn(4, 6))


def run(*args: str) -> Any:
    return CliRunner().invoke(app, ["audit", *args])


# ---- JSON ----


def test_audits_follow_the_published_schema(minilm: Audit, faulty: Audit) -> None:
    validator = jsonschema.Draft202012Validator(SCHEMA)
    validator.check_schema(SCHEMA)
    for result in (minilm, faulty):
        written = json.loads(result.to_json())
        validator.validate(written)
        for path in (("norms", 0, "placement"), ("branches",), ("findings",), ("norms", 0, "location")):
            broken = json.loads(json.dumps(written))
            holder = broken
            for step in path[:-1]:
                holder = holder[step]
            del holder[path[-1]]
            assert not validator.is_valid(broken), f"the schema does not miss {path}"


def test_a_norm_that_no_spec_describes_follows_it_too() -> None:
    class Other(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x / (x.abs().mean(-1, keepdim=True) + 1e-3)

    result = audit(nn.Sequential(nn.Linear(6, 6), Other()), torch.randn(4, 6))
    assert [n.spec for n in result.norms] == [None]
    jsonschema.validate(json.loads(result.to_json()), SCHEMA, jsonschema.Draft202012Validator)


def test_the_schema_is_printed() -> None:
    result = run("--json-schema")
    assert result.exit_code == 0
    assert json.loads(result.stdout) == SCHEMA


# ---- SARIF and GitHub ----


def test_sarif_is_valid_and_says_where(faulty: Audit) -> None:
    log = sarif(faulty, title="faulty")
    jsonschema.Draft202012Validator(SARIF).validate(log)
    (made,) = log["runs"]
    assert len(made["results"]) == len(faulty.findings) > 1
    by_rule = {r["ruleId"]: r for r in made["results"]}
    found = by_rule["batch-statistics-at-inference"]
    assert found["level"] == "error"
    place = found["locations"][0]
    assert place["physicalLocation"]["artifactLocation"]["uri"].endswith("tests/audit/test_report.py")
    line = place["physicalLocation"]["region"]["startLine"]
    assert "self.final_norm(" in Path(__file__).read_text().splitlines()[line - 1]
    assert place["logicalLocations"][0]["fullyQualifiedName"] == "final_norm"
    for result in made["results"]:
        assert made["tool"]["driver"]["rules"][result["ruleIndex"]]["id"] == result["ruleId"]
    broken = json.loads(json.dumps(log))
    broken["runs"][0]["results"][0]["level"] = "grave"
    assert not jsonschema.Draft202012Validator(SARIF).is_valid(broken)


def test_an_audit_without_findings_is_valid_sarif(minilm: Audit) -> None:
    jsonschema.Draft202012Validator(SARIF).validate(sarif(minilm, title="minilm"))


def test_github_annotations(faulty: Audit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parent.parent.parent)
    lines = list(github(faulty, title="a,b"))
    assert len(lines) == len(faulty.findings)
    assert re.match(r"::error file=tests/audit/test_report\.py,line=\d+,title=a%2Cb%3A batch-stat[\w-]+::final_norm: ", lines[0])  # fmt: skip  # noqa: E501
    assert all("\n" not in line for line in lines)


def test_files_from_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    log, report, data = tmp_path / "a.sarif", tmp_path / "a.html", tmp_path / "data.safetensors"
    import transformers
    from safetensors.torch import save_file

    config = transformers.AutoConfig.from_pretrained(tmp_path)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    tokens = torch.randint(3, 99, (2, 7))
    save_file({"0.input_ids": tokens, "1.input_ids": tokens[:1, :5].clone()}, data)
    result = run(str(tmp_path), "--sarif", str(log), "--html", str(report), "--data", str(data), "--github")
    assert result.exit_code == 0, result.output
    assert re.search(r"^::notice .*title=.*misleading-name::model\.layers\.0", result.stdout, re.MULTILINE)
    jsonschema.Draft202012Validator(SARIF).validate(json.loads(log.read_text()))
    assert "2 batches of" in report.read_text()
    numbers = json.loads(run(str(tmp_path), "--data", str(data), "--json", "-").stdout)["numbers"]
    assert numbers["batches"] == 2 and len(numbers["branches"]) == 6 and numbers["notes"] == []


@pytest.mark.parametrize(
    ("data", "said"),
    [("missing.safetensors", "cannot read --data"), ("tokens.pt", "must be a .safetensors file"), ("inputs", "meta")],
)
def test_data_that_cannot_be_used(data: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    result = run(str(tmp_path), "--data", data)
    assert result.exit_code == 2 and said in result.stderr and "Traceback" not in result.output


# ---- the table ----


def test_the_table_tells_axes_and_inline_places(faulty: Audit) -> None:
    text = str(faulty)
    assert re.search(r"inline, test_report\.py:\d+", text)
    assert "batch, 6 channels" in text


def test_the_table_tells_how_far_a_norm_is_from_the_order_that_it_is_said_to_have() -> None:
    class Rounded(nn.Module):
        """Squares in half precision, and takes their mean in float32: an order that no spec has."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.rand(24) + 0.5)

        def forward(self, x: Tensor) -> Tensor:
            square = x.pow(2).float().mean(-1, keepdim=True)
            return self.weight * (x.float() * torch.rsqrt(square + 1e-6)).to(x.dtype)

    torch.manual_seed(0)
    result = audit(nn.Sequential(nn.Linear(24, 24), Rounded(), nn.LayerNorm(24)), torch.randn(2, 5, 24))
    odd, usual = result.norms
    assert odd.half_mismatch is not None and odd.half_mismatch > 1e-3
    assert f"(but {100 * odd.half_mismatch:.2g} % of outputs)" in str(result)
    assert describe.mismatch(usual) == "" and str(result).count("% of outputs") == 1


def test_a_norm_of_each_head_and_one_of_all_heads_read_differently() -> None:
    found = {}
    for kind in ("qwen3", "olmo2"):
        loaded = load(kind)
        result = audit(loaded.model, **loaded.kwargs)
        found[kind] = {describe.axes(n) for n in result.norms if n.placement == "qk"}
    assert found == {"qwen3": {"128 of each head"}, "olmo2": {"4096"}}


class Block(nn.Module):
    """A convolutional block in the manner of a diffusion model's, whose layers have numbers for names."""

    def __init__(self, given: int, width: int) -> None:
        super().__init__()
        self.into = nn.Sequential(nn.GroupNorm(2, given), nn.SiLU(), nn.Conv2d(given, width, 3, padding=1))
        self.out = nn.Sequential(nn.GroupNorm(2, width), nn.SiLU(), nn.Conv2d(width, width, 3, padding=1))
        self.skip = nn.Identity() if given == width else nn.Conv2d(given, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.skip(x) + self.out(self.into(x))


class Hourglass(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.down, self.second = Block(8, 8), nn.Conv2d(8, 8, 3, 2, 1), Block(8, 16)
        self.third, self.last = Block(16, 16), Block(24, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        deep = self.third(self.second(self.down(x)))
        return self.last(torch.cat([nn.functional.interpolate(deep, scale_factor=2), x], 1))


def test_several_streams_and_numbered_layers_have_names_that_tell_them_apart() -> None:
    x = torch.randn(2, 8, 8, 8)
    text = page(audit(Hourglass(), x, data=[x]), title="hourglass")
    assert "residual stream 0" in text
    assert "stream stream" not in text
    chips = re.findall(r'class="tiny"[^>]*>([^<]*)<', text)
    assert "out.*" in chips
    assert not any(chip.isdigit() for chip in chips)


def test_the_tables_end_with_what_was_measured() -> None:
    model = normkit.Transformer(vocab=20, dim=16, depth=2, heads=2).eval()
    tokens = torch.randint(0, 20, (2, 5))
    result = audit(model, tokens, data=[tokens, tokens])
    assert result.numbers is not None
    least = min(result.numbers.branches, key=lambda b: b.share)
    said = " ".join(str(result).split())
    assert "measured over 2 batches: stream RMS" in said
    assert f"least branch share {least.share:.2g} ({least.name})" in said
    assert "measured over" not in str(audit(model, tokens))


def test_repeated_runs_are_folded() -> None:
    folded = [("".join(r.items), r.times) for r in runs("eabababxyxyf", "eabababxyxyf")]
    assert folded == [("e", 1), ("ab", 3), ("xy", 2), ("f", 1)]


def test_every_norm_of_a_stream_is_in_its_plan(minilm: Audit) -> None:
    (stream,), loose = plan.streams(minilm)
    assert loose == []
    assert [(len(r.items), r.times) for r in stream.runs] == [(1, 1), (4, 6)]
    drawn = [s.norm for r in stream.runs for s in r.items if s.norm is not None]
    assert [n.placement for n in drawn] == ["embedding", "post", "post"]


# ---- HTML ----


class Outline(HTMLParser):
    """Tags with their attributes, and balance."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "wbr"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_one_small_offline_file_without_scripts(minilm: Audit) -> None:
    text = page(minilm, title="<minilm> & co")
    assert len(text.encode()) < 2_000_000
    assert "<minilm>" not in text and "&lt;minilm&gt; &amp; co" in text
    outline = Outline(text)
    assert outline.open == []
    names = {tag for tag, _ in outline.tags}
    assert not names & {"script", "link", "img", "iframe", "object"}
    assert not any(key.startswith("on") or key in ("src", "href") for _, attrs in outline.tags for key in attrs)
    assert "url(" not in text and "@import" not in text


def test_the_page_holds_everything(minilm: Audit, faulty: Audit) -> None:
    text = page(minilm, title="minilm")
    assert all(f"<title>{n.name}, " in text or n.name.replace(".", ".<wbr>") in text for n in minilm.norms)
    for heading in ("Stream", "Branch share", "Gains", "Outlier channels", "Attention logits", "Gradients"):
        assert f"<h3>{heading}</h3>" in text
    text = page(faulty, title="faulty")
    for finding in faulty.findings:
        assert finding.rule in text and finding.fix.split("(")[0][:40].replace("'", "&#39;") in text


def test_what_it_draws_can_be_read_aloud(minilm: Audit) -> None:
    outline = Outline(page(minilm, title="minilm"))
    drawings = [attrs for tag, attrs in outline.tags if tag == "svg"]
    assert len(drawings) == 7
    assert all(a["role"] == "img" and a["aria-label"] for a in drawings)
    scrolled = [a for _, a in outline.tags if a.get("class") == "scroll"]
    assert all(a["tabindex"] == "0" and a["aria-label"] for a in scrolled)
    assert all(a.get("scope") == "col" for tag, a in outline.tags if tag == "th")


def test_a_notebook_shows_it_in_a_frame(minilm: Audit) -> None:
    (_, attrs), *_ = Outline(minilm._repr_html_()).tags
    assert (attrs["srcdoc"] or "").lstrip().startswith("<!doctype html>")


def test_a_model_of_many_layers_stays_small() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.map = nn.LayerNorm(4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.map(self.norm(x))

    small = audit(nn.Sequential(nn.Linear(4, 4), Block(), Block()), torch.randn(2, 4))
    (norm, *_), (branch, *_) = small.norms, small.branches
    deep = replace(
        small,
        norms=tuple(replace(norm, name=f"{n}.norm") for n in range(400)),
        branches=tuple(replace(branch, name=f"{n}.map", slots={"input": [f"{n}.norm"]}) for n in range(400)),
    )
    text = page(deep, title="deep")
    assert "×400" in text and len(text.encode()) < 2_000_000


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed (Debian: apt-get install chromium)")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_browser_renders_it(minilm: Audit, tmp_path: Path, scheme: str) -> None:
    """Light and dark give pages of their own background, and the drawing is on it."""
    report, shot = tmp_path / "report.html", tmp_path / "shot.png"
    report.write_text(page(minilm, title="minilm"), encoding="utf-8")
    options = ["--force-dark-mode"] if scheme == "dark" else []
    command = [
        CHROMIUM or "", "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
        "--window-size=900,1400",
        f"--user-data-dir={tmp_path / 'profile'}", f"--screenshot={shot}", *options,
        report.as_uri(),
    ]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True, timeout=240)
    with Image.open(shot) as image:
        pixels = torch.frombuffer(bytearray(image.convert("RGB").tobytes()), dtype=torch.uint8)
        pixels = pixels.reshape(image.height, image.width, 3)
    corner, bright = pixels[2, 2], pixels.float().mean(-1)
    assert bool(corner.float().mean() > 200) is (scheme == "light")
    assert float(bright.std()) > 10  # not an empty page
    norm = torch.tensor([0xDB, 0xE9, 0xFB] if scheme == "light" else [0x1C, 0x33, 0x50])
    assert int((pixels.int() - norm).abs().amax(-1).le(2).sum()) > 1000  # the norms' own colour: they are drawn
