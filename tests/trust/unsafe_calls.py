"""Find calls that can run code from a file or a string, with the syntax tree and its imports.

A text search would miss `from torch import load as get` and would report `model.eval()`.
"""

import ast
from collections.abc import Iterator

UNSAFE_MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "shelve", "marshal"}
UNSAFE_MODULES |= {"joblib", "imp", "code", "runpy"}
BUILTINS = {"eval", "exec", "compile", "__import__"}
UNSAFE = {
    *("os.system", "os.popen", "os.posix_spawn", "subprocess.getoutput"),
    *("subprocess.getstatusoutput", "pty.spawn"),
    *("torch.jit.load", "torch.hub.load", "torch.package.PackageImporter", "torch.export.load"),
    *("pandas.read_pickle", "numpy.lib.format.read_array_pickle", "tarfile.fully_trusted_filter"),
    *("shutil.unpack_archive", "importlib.util.spec_from_file_location"),
}
UNSAFE_BY_OTHER_NAME = {
    "torch.load",
    "numpy.load",
    "yaml",
}  # safe only with the right arguments
ALIASES = {"np": "numpy", "numpy": "numpy", "torch": "torch", "yaml": "yaml", "os": "os"}


def find_unsafe_calls(source: str) -> list[str]:
    """List each call, reference or import that can run code from a file or a string, with its line.

    >>> find_unsafe_calls("from torch import load as get\\nget(path)")
    ['2: torch.load without weights_only=True']
    """
    kinds = (ast.Import, ast.ImportFrom, ast.Name, ast.Attribute, ast.Call)
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, kinds)]
    known = dict(ALIASES)
    for node in nodes:
        known |= dict(_imported(node))
    found = []
    for node in nodes:
        found += [f"{node.lineno}: {reason}" for reason in _unsafe_in_node(node, known)]
    return sorted(set(found), key=lambda line: int(line.partition(":")[0]))


def _imported(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield local names and full names of an import."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            full_name = alias.name if alias.asname else alias.name.split(".")[0]
            yield alias.asname or full_name, full_name
    elif isinstance(node, ast.ImportFrom) and not node.level:
        for alias in node.names:
            yield alias.asname or alias.name, f"{node.module}.{alias.name}"


def _unsafe_in_node(node: ast.AST, known: dict[str, str]) -> Iterator[str]:
    if isinstance(node, ast.Import | ast.ImportFrom):
        names = [full_name for _, full_name in _imported(node)]
        yield from (f"imports {one}" for one in names if one.split(".")[0] in UNSAFE_MODULES)
        yield from (f"imports {one}" for one in names if one in UNSAFE or one == "builtins")
    elif isinstance(node, ast.Name) and node.id in BUILTINS and known.get(node.id) is None:
        yield f"builtin {node.id}"
    elif isinstance(node, ast.Attribute):
        name = _name(node, known)
        if name in UNSAFE or name.startswith(("os.exec", "os.spawn")):
            yield name
    elif isinstance(node, ast.Call):
        yield from _unsafe_in_call(node, known)


def _unsafe_in_call(node: ast.Call, known: dict[str, str]) -> Iterator[str]:
    name = _name(node.func, known)
    constants = {k.arg: k.value.value for k in node.keywords if isinstance(k.value, ast.Constant)}
    keywords = {k.arg for k in node.keywords}
    if name == "getattr" and len(node.args) > 1 and isinstance(node.args[1], ast.Constant):
        full_name = f"{_name(node.args[0], known)}.{node.args[1].value}"
        if full_name in UNSAFE | UNSAFE_BY_OTHER_NAME | {f"builtins.{one}" for one in BUILTINS}:
            yield f"hides {full_name}"
    if name in UNSAFE:
        yield name
    if name == "torch.load" and constants.get("weights_only") is not True:
        yield "torch.load without weights_only=True"
    if name.startswith("yaml.") and name.endswith("load") and name != "yaml.safe_load":
        yield name
    if "allow_pickle" in keywords and constants.get("allow_pickle") is not False:
        yield f"{name} with allow_pickle"
    if "shell" in keywords and constants.get("shell") is not False:
        yield "shell=True"
    if "trust_remote_code" in keywords and constants.get("trust_remote_code") is not False:
        yield "trust_remote_code=True"
    if name.endswith(".extractall") and constants.get("filter") != "data":
        yield 'extractall without filter="data"'


def _name(node: ast.AST, known: dict[str, str]) -> str:
    """Return the dotted name of a call, with its first part resolved through imports."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    first = known.get(node.id, node.id) if isinstance(node, ast.Name) else "?"
    return ".".join([first, *reversed(parts)])
