"""The house rules as tests. Each rule takes a root folder and returns complaints: file, name, what to do."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CODE = ("nereus", "tests", "experiments", "scripts", "analysis", "baselines", "benchmarks")
MAX_FILE_LINES, MAX_FUNCTION_LINES = 500, 50

# A number says its unit in its name: `bucket_bytes`, `send_bytes_per_second`, `prompts_per_step`, or the bare unit.
UNITS = """
    bytes seconds flops tokens samples prompts sequences requests steps epochs mini_batches micro_batches transitions nodes
    slots nodes ranks replicas groups processes threads descriptors files buckets pieces layers heads elements rows experts
    nics count ratio share fraction percent nats
"""
UNIT = "|".join(word.removesuffix("s") + "s?" for word in UNITS.split())
HAS_UNIT = re.compile(rf"(.*_)?({UNIT})(_per_({UNIT}))?")

CONTAINERS = ("Optional", "tuple", "list", "Sequence")

# Numbers without a unit, by the reason why they have none. A name counts whole, or as the last `_word` of a longer one.
DIMENSIONLESS = {
    "a degree of parallelism or a coordinate in one": "tp pp dp cp ep etp edp tp_rank pp_rank dp_rank only_engine_tps",
    "identifies something, is not a quantity":
        "id ids index position rank slot source destination replica step turn layer head version seed port pid digest responses expert stream hop",
    "a coordinate or extent in a tensor's own index space": "shape start stop axis axes offset stride dim",
    "the index of a plan's pool, and the slots or the pool of each": "pool pools pool_of",
    "how a StagePlan cuts, in layers, samples and samples: the words of the config": "pipeline shares micro_batch",
    "the model's sizes under the names of its papers and HF configs": "hidden ffn vocab hidden_size vocab_size",
    "a coefficient of an algorithm under its usual name":
        "lr gamma lam coef eps beta1 beta2 decay clip clip_grad clip_ratio_low clip_ratio_high temperature theta factor std",
    "a loss, a reward or a statistic of them":
        "loss reward score scores norm mean first last kl entropy logprob logprobs standard_errors mean_exp_abs parity_max"
        " parity_mean_exp",
}  # fmt: skip
UNITLESS = {name for names in DIMENSIONLESS.values() for name in names.split()}

BANNED_FILE = re.compile(r"(.*_)?(utils?|helpers?|managers?)|common|misc|base|registry|registries")
REGISTRY_HOST = re.compile(
    rb"pypi\.org|pythonhosted\.org|npmjs\.(org|com)|download\.pytorch\.org|anaconda\.org|(deb|archive)\.(debian|ubuntu)\.\w+"
    rb"|crates\.io|proxy\.golang\.org|yarnpkg\.com"
)


def code(root: Path, *folders: str, word: str = "") -> Iterator[tuple[str, ast.Module, str]]:
    """(path relative to root, parsed tree, text) of each Python file in the folders that has the word."""
    for path in sorted(path for folder in folders for path in (root / folder).rglob("*.py")):
        text = path.read_text()
        if word in text:
            yield str(path.relative_to(root)), ast.parse(text, str(path)), text


def statements(node: ast.AST) -> Iterator[ast.AST]:
    """All statements within, however deep, and no expressions: those are most of a tree."""
    for name in ("body", "orelse", "handlers", "finalbody", "cases"):
        inner = getattr(node, name, None)
        for child in inner if isinstance(inner, list) else ():
            yield child
            yield from statements(child)


def long_files_and_functions(root: Path) -> Iterator[str]:
    for path, tree, text in code(root, *CODE):
        if (lines := len(text.splitlines())) > MAX_FILE_LINES:
            yield f"{path}: {lines} lines; split it by the nouns it owns (at most {MAX_FILE_LINES})"
        for node in statements(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > MAX_FUNCTION_LINES:
                    yield f"{path}:{node.lineno}: {node.name} has {lines} lines; split it (at most {MAX_FUNCTION_LINES})"


def is_number(annotation: ast.expr) -> bool:
    """int, float, unions, Optional, tuples and lists of them; not mappings or callables."""
    match annotation:
        case ast.Name(id=name):
            return name in ("int", "float")
        case ast.Constant(value=str(text)):
            return is_number(ast.parse(text, mode="eval").body)
        case ast.BinOp(left=left, right=right):
            return is_number(left) or is_number(right)
        case ast.Tuple(elts=elements):
            return any(map(is_number, elements))
        case ast.Subscript(value=container, slice=inner) if ast.unparse(container).endswith(CONTAINERS):
            return is_number(inner)
    return False


def numbers_without_unit(root: Path) -> Iterator[str]:
    for path, tree, _ in code(root, "nereus", word="dataclass"):
        for record in (node for node in statements(tree) if isinstance(node, ast.ClassDef)):
            if not any("dataclass" in ast.unparse(decorator) for decorator in record.decorator_list):
                continue
            for field in record.body:
                if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
                    continue
                name = field.target.id.strip("_")
                endings = {name, name.split("_")[-1]}
                if is_number(field.annotation) and not HAS_UNIT.fullmatch(name) and not endings & UNITLESS:
                    yield (
                        f"{path}:{field.lineno}: {record.name}.{name} is a number without a unit; end it with _bytes, "
                        "_seconds, _tokens, ... (UNITS in tests/architecture/test_house_rules.py), or, if it has none, "
                        "enter it in DIMENSIONLESS there under the reason"
                    )


def words_missing_in_glossary(root: Path) -> Iterator[str]:
    readme = root / "README.md"
    text = readme.read_text() if readme.exists() else ""
    section = re.search(r"^(#+) [^\n]*glossary[^\n]*\n(.*?)(?=^\1 |\Z)", text, re.IGNORECASE | re.MULTILINE | re.DOTALL)
    if section is None:
        yield "README.md: has no heading 'Glossary'; add one with a table of the public names, each in `backticks`"
        return
    words = {word for span in re.findall(r"`([^`]+)`", section[2]) for word in re.split(r"[,\s]+", span)}
    for path in sorted((root / "nereus").glob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_") and node.name not in words:
                yield f"nereus/{path.name}:{node.lineno}: {node.name} is not in README.md's glossary; add it, or use a word that is there"


def banned_file_names(root: Path) -> Iterator[str]:
    for path in (path for folder in CODE for path in (root / folder).rglob("*")):
        if "__pycache__" not in path.parts and BANNED_FILE.fullmatch(path.stem):
            yield f"{path.relative_to(root)}: name it after the noun it owns, not {path.stem}"


def folders_without_init(root: Path) -> Iterator[str]:
    for folder in sorted({path.parent for path in (root / "nereus").rglob("*.py")}):
        if not (folder / "__init__.py").exists():
            yield f"{folder.relative_to(root)}: add __init__.py with a docstring; import rule and packaging miss it otherwise"


def mocks(root: Path) -> Iterator[str]:
    for path, tree, _ in code(root, *CODE, word="mock"):
        for node in ast.walk(tree):
            modules: list[str] = []
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                modules = [f"{node.module}.{alias.name}" for alias in node.names]
            for module in modules:
                if f"{module}.".startswith(("unittest.mock.", "mock.")):
                    yield f"{path}: imports {module}; no mocks: use the simulated world or a small real object"


def registry_hosts(root: Path) -> Iterator[str]:
    """Files that git tracks or would; folders and files that set-up, tests and runs make are left out."""
    made = re.compile(r"\.git|\.venv|runs|build|__pycache__|.*\.egg-info|\..*_cache|\.hypothesis")
    folders = [root]
    while folders:
        for path in sorted(folders.pop().iterdir()):
            if made.fullmatch(path.name) or path.is_symlink():
                continue
            if path.is_dir():
                folders.append(path)
            elif found := REGISTRY_HOST.search(path.read_bytes()):
                yield f"{path.relative_to(root)}: names {found[0].decode()}; say what to set, not which host"


# (rule, a file that breaks it, its text, a word of the complaint)
RULES: list[tuple[Callable[[Path], Iterator[str]], str, str, str]] = [
    (long_files_and_functions, "nereus/a.py", "x = 1\n" * 501, "501 lines"),
    (long_files_and_functions, "tests/a.py", "def f():\n" + "    x = 1\n" * 50, "f has 51 lines"),
    (numbers_without_unit, "nereus/a.py", "@dataclass(frozen=True)\nclass A:\n    size: int\n", "A.size"),
    (numbers_without_unit, "nereus/rl/a.py", "@dataclass\nclass A:\n    waits: tuple[float, ...] | None\n", "A.waits"),
    (words_missing_in_glossary, "nereus/a.py", "class Engine:\n    pass\n", "Engine is not in"),
    (banned_file_names, "nereus/rl/data_utils.py", "", "data_utils"),
    (banned_file_names, "nereus/common/a.py", "", "common"),
    (folders_without_init, "nereus/rl/a.py", "", "nereus/rl"),
    (mocks, "tests/a.py", "from unittest import mock\n", "unittest.mock"),
    (mocks, "tests/a.py", "from unittest.mock import patch\n", "unittest.mock"),
    (registry_hosts, "docs/a.md", "see https://py" + "pi.org/project/x", "names py"),
]


@pytest.mark.parametrize("rule", dict.fromkeys(rule for rule, *_ in RULES))
def test_rule_holds(rule: Callable[[Path], Iterator[str]]) -> None:
    complaints = list(rule(ROOT))
    assert not complaints, "\n" + "\n".join(complaints)


@pytest.mark.parametrize(("rule", "path", "text", "complaint"), RULES)
def test_rule_can_fail(
    rule: Callable[[Path], Iterator[str]], path: str, text: str, complaint: str, tmp_path: Path
) -> None:
    (tmp_path / path).parent.mkdir(parents=True)
    (tmp_path / path).write_text(text)
    (tmp_path / "README.md").write_text("# x\n## Glossary\n| `Slot`, `Fleet` | x |\n## Next\n`Engine`\n")
    assert any(complaint in line for line in rule(tmp_path))


def test_numbers_with_units_pass(tmp_path: Path) -> None:
    names = "bytes bucket_bytes send_bytes_per_second prompts_per_step seed actor_lr tp kv_heads micro_batch_samples"
    (tmp_path / "nereus").mkdir()
    fields = "".join(f"    {name}: int\n" for name in names.split())
    (tmp_path / "nereus/a.py").write_text(f"@dataclass\nclass A:\n{fields}    by_name: dict[str, int]\n")
    assert list(numbers_without_unit(tmp_path)) == []
