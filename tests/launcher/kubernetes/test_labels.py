"""Labels and annotations are named in one file."""

import ast
from pathlib import Path

from jaxlaunch.launcher.kubernetes import labels

ROOT = Path(__file__).parents[3]


def test_no_other_file_spells_a_label_or_an_annotation() -> None:
    spelled = {
        f"{path.relative_to(ROOT)}:{node.lineno}: {node.value}"
        for path in (ROOT / "jaxlaunch" / "launcher").rglob("*.py")
        if path != Path(labels.__file__)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if any(f"{domain}/" in node.value for domain in labels.RESERVED_DOMAINS)
    }
    assert spelled == set()
