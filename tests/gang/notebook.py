"""Execute the code cells of a notebook as IPython does, without a kernel.

Each cell is a part of the module `__main__`, which has no file, and its source is found by
`linecache`. The last expression of a cell is shown, by `_repr_html_` if it has one. Arguments: the
notebook. The shown values are printed as JSON, one a line.
"""

from __future__ import annotations

import ast
import json
import linecache
import sys
import types
from pathlib import Path


def execute_notebook(path: Path) -> None:
    """Execute all code cells, and print what they show."""
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    for number, cell in enumerate(json.loads(path.read_text())["cells"]):
        if cell["cell_type"] != "code":
            continue
        source, name = "".join(cell["source"]), f"<cell {number}>"
        linecache.cache[name] = (len(source), None, source.splitlines(True), name)
        statements = ast.parse(source, name).body
        last = statements.pop() if isinstance(statements[-1], ast.Expr) else None
        exec(compile(ast.Module(statements, []), name, "exec"), module.__dict__)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), name, "eval"), module.__dict__)
            show = getattr(value, "_repr_html_", lambda value=value: value)
            print(json.dumps(show()), flush=True)


if __name__ == "__main__":
    execute_notebook(Path(sys.argv[1]))
