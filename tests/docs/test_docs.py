"""README and docs/ are true where a machine can tell: code blocks run, commands exist, links lead somewhere.

The blocks of a page run one after another, as a reader would paste them, on virtual devices. What a page takes for
granted of its reader (a model, data, a study) is in BEFORE. What it says of a GPU or of days is made small by SMALLER.
"""

from __future__ import annotations

import importlib.util
import re
import shlex
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from hydra_tune import cli

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

ROOT = Path(__file__).parent.parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NOT_RUN = {
    "README.md#with-ray-tune": "starts Ray and its processes; test_ray_examples.py runs it, with `make proof`",
    "docs/ray.md#under-ray-tune": "the same",
}
TORCH = """
import torch, hydra_tune
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

build_model = lambda *_: nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(6)))
train_loader = DataLoader(TensorDataset(torch.randn(8, 64), torch.randn(8, 64)), batch_size=4)
loss_fn = nn.functional.mse_loss
validate = lambda model: model(torch.ones(4, 64)).square().mean().item()
"""
OPTUNA = """
import optuna
study = optuna.create_study()
def objective(trial):
    model = build_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=trial.suggest_float("lr", 1e-3, 1e-1, log=True))
    hydra_tune.prepare(model, optimizer)
    for _ in range(3):
        model(torch.ones(4, 64)).square().mean().backward()
        optimizer.step()
    return validate(model)
"""
TRAINERS = """
import transformers, lightning
from lightning_modules import Classifier, data as rows
from hugging_face import DATA, arguments, gpt

class Rows(lightning.LightningDataModule):
    train_dataloader = val_dataloader = lambda self: DataLoader(rows(8), batch_size=4)

model, args, data = gpt(layers=1), arguments("out"), DATA
"""
BEFORE = {
    "README.md": TORCH + TRAINERS,
    "docs/index.md": TORCH,
    "docs/optuna.md": TORCH + OPTUNA,
    "docs/checkpoints.md": TORCH + OPTUNA + "EPOCHS, pool = 2, hydra_tune.ShardPool(['cpu'], '256KiB')",
    "docs/simulate.md": TORCH + OPTUNA + """
pool = hydra_tune.ShardPool(['cpu'], '256KiB')
hydra_tune.optimize(study, objective, n_trials=1, pool=pool)
""",
    "docs/view.md": TORCH + OPTUNA + """
pool = hydra_tune.ShardPool(['cpu'], '256KiB')
runner, writer = hydra_tune.HydraTrialRunner(pool), lambda figures, second: None
""",
    "docs/ray.md": TORCH + "from hydra_tune import tune",
    "docs/huggingface.md": TORCH + OPTUNA + TRAINERS + """
from accelerate import Accelerator
from transformers import Trainer
make_model = model_init = lambda: gpt(layers=1)
train_set = eval_set = DATA[:4]
optimizer, loader = torch.optim.SGD(model.parameters(), lr=1e-3), train_loader
""",
    "docs/lightning.md": TORCH + TRAINERS + """
LitModel, data = lambda lr: Classifier(lr, depth=2), Rows()
fabric, model = lightning.Fabric(accelerator="cpu", devices=1), build_model()
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
""",
}  # fmt: skip
SMALLER = [
    (r'ShardPool\(memory="20GiB"\)', 'ShardPool(["cpu"], memory="2MiB")'),
    (r"n_trials=(8|16|64)", "n_trials=2"),
    (r"concurrency=(4|8)", "concurrency=2"),
    (r"max_epochs=10", 'max_epochs=1, accelerator="cpu", enable_progress_bar=False, logger=False'),
    (r'TrainingArguments\(\s*"out"', 'TrainingArguments("out", max_steps=1, use_cpu=True, report_to=[]'),
]
IGNORED = ("ignore::FutureWarning", "ignore:.*pin_memory", "ignore:.*num_workers")  # of other libraries


@dataclass(frozen=True)
class Block:
    """A fenced one, by its page and the heading above it."""

    name: str
    language: str
    text: str
    line: int


@dataclass(frozen=True)
class Page:
    blocks: tuple[Block, ...]
    anchors: frozenset[str]
    links: tuple[str, ...]
    code: tuple[str, ...]  # within a line


@cache
def read(path: Path) -> Page:
    tokens = MarkdownIt("commonmark").enable("table").parse(path.read_text(encoding="utf-8"))
    page, heading = path.relative_to(ROOT).as_posix(), ""
    blocks, anchors, links, code = [], [], [], []
    for before, token in zip([None, *tokens], tokens, strict=False):
        if token.type == "inline" and before is not None and before.type == "heading_open":
            heading = slug(token.content)
            anchors.append(heading)
        if token.type == "fence":
            same = sum(block.name.startswith(f"{page}#{heading}") for block in blocks)
            name = f"{page}#{heading}" + (f" ({same + 1})" if same else "")
            blocks.append(Block(name, token.info, token.content, token.map[0] + 1))
        for child in token.children or ():
            if child.type == "link_open":
                links.append(child.attrGet("href"))
            elif child.type == "code_inline":
                code.append(child.content)
    return Page(tuple(blocks), frozenset(anchors), tuple(links), tuple(code))


def slug(heading: str) -> str:
    """As GitHub names a heading's anchor."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def pages(*, python: bool = False) -> list[object]:
    chosen = [p for p in PAGES if not python or any(block.language == "python" for block in read(p).blocks)]
    return [pytest.param(path, id=path.name) for path in chosen]


@pytest.mark.filterwarnings(*IGNORED)
@pytest.mark.parametrize("path", pages(python=True))
def test_every_python_block_runs(path, tmp_path, monkeypatch):
    before, space = BEFORE.get(path.relative_to(ROOT).as_posix(), ""), {"__name__": path.stem}
    for library in ("transformers", "lightning") if TRAINERS in before else ():
        pytest.importorskip(library)
    monkeypatch.setenv("HYDRA_TUNE_CHECKS", "0")  # as users run them
    monkeypatch.chdir(tmp_path)
    exec(before, space)
    for block in read(path).blocks:
        if block.language != "python":
            continue
        text = block.text
        for large, small in SMALLER:
            text = re.sub(large, small, text)
        code = compile("\n" * block.line + text, path, "exec")
        if block.name not in NOT_RUN:
            exec(code, space)
    trials = space["study"].trials if "study" in space and path.name != "memory.md" else ()
    assert not any("hydra_tune: pruned because" in trial.user_attrs for trial in trials)


def test_blocks_that_do_not_run_are_there():
    assert NOT_RUN.keys() <= {block.name for path in PAGES for block in read(path).blocks}


@pytest.mark.parametrize("path", pages())
def test_every_command_exists(path):
    for block in read(path).blocks:
        for line in block.text.splitlines() if block.language == "sh" else ():
            check_command(shlex.split(line, comments=True))
    for code in read(path).code:
        if re.match(r"(make|pip|python|pytest|hydra-tune) ", code):
            check_command(shlex.split(code), is_whole=False)


def check_command(words: list[str], *, is_whole: bool = True) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    match words:
        case ["make", target]:
            assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE), words
        case ["pip", "install", what]:
            (extras,) = re.findall(r"^(?:\.|hydra-tune)\[(.*)\]$", what)
            assert set(extras.split(",")) <= project["optional-dependencies"].keys(), words
        case ["python", "-m", module, *_]:
            assert importlib.util.find_spec(module) is not None, words
        case ["pytest", "-m", marker, *files]:
            assert marker in ("gpu", "proof") and all((ROOT / file).exists() for file in files), words
        case ["hydra-tune", command, *rest]:
            if is_whole:
                cli._parser().parse_args([command, *rest])
            else:
                assert command in cli._parser()._subparsers._group_actions[0].choices, words
        case _:
            raise AssertionError(f"what is {words}?")


@pytest.mark.parametrize("path", pages())
def test_every_link_leads_somewhere(path):
    for link in read(path).links:
        if re.match(r"https?://", link):
            continue
        file, _, anchor = link.partition("#")
        target = (path.parent / file).resolve() if file else path
        assert target.exists(), link
        assert not anchor or anchor in read(target).anchors, link


@pytest.mark.parametrize("path", pages())
def test_every_file_that_is_named_is_there(path):
    tests = {each.name for each in (ROOT / "tests").rglob("*.py")}
    for code in read(path).code:
        if re.fullmatch(r"(hydra_tune|integrations|tests|benchmarks|docs|notebooks)/[\w/.]+\.\w+", code):
            assert (ROOT / code).exists(), code
        elif re.fullmatch(r"test_\w+\.py", code):
            assert code in tests, code


@pytest.mark.parametrize("path", pages())
def test_lines_are_short(path):
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        assert len(line) <= 120 or line.startswith("|"), f"{path.name}:{number}"  # a table's row cannot be broken


def test_the_readme_is_a_page_and_the_glossary_is_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120
    words = (ROOT / "docs" / "concepts.md").read_text().partition("## Words")[2]
    assert len(re.findall(r"^\| [a-z]", words, re.MULTILINE)) - 1 <= 20  # less the header
