"""Calls that run what they read, found by syntax tree: names are followed through imports.

A search for words would miss `from torch import load as get`, and would take `model.eval()` for
the builtin.
"""

import ast
from collections.abc import Iterator

UNSAFE_MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "shelve", "marshal"}
UNSAFE_MODULES |= {"joblib", "imp", "code", "runpy"}
BUILTINS = {"eval", "exec", "compile", "__import__"}
NEVER = {
    *("os.system", "os.popen", "os.posix_spawn", "subprocess.getoutput"),
    *("subprocess.getstatusoutput", "pty.spawn"),
    *("torch.jit.load", "torch.hub.load", "torch.package.PackageImporter", "torch.export.load"),
    *("pandas.read_pickle", "numpy.lib.format.read_array_pickle", "tarfile.fully_trusted_filter"),
    *("shutil.unpack_archive", "importlib.util.spec_from_file_location"),
}
MAYBE = {"torch.load", "numpy.load", "yaml"}  # safe with the right words, so never by another name
SHORT = {"np": "numpy", "numpy": "numpy", "torch": "torch", "yaml": "yaml", "os": "os"}


def dangers(source: str) -> list[str]:
    """Each call, reference or import that could run code out of a file or a string, with its line.

    >>> dangers("from torch import load as get\\nget(path)")
    ['2: torch.load without weights_only=True']
    """
    kinds = (ast.Import, ast.ImportFrom, ast.Name, ast.Attribute, ast.Call)
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, kinds)]
    known = dict(SHORT)
    for node in nodes:
        known |= dict(_imported(node))
    found = []
    for node in nodes:
        found += [f"{node.lineno}: {what}" for what in _of(node, known)]
    return sorted(set(found), key=lambda line: int(line.partition(":")[0]))


def _imported(node: ast.AST) -> Iterator[tuple[str, str]]:
    """What a name stands for after an import."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            whole = alias.name if alias.asname else alias.name.split(".")[0]
            yield alias.asname or whole, whole
    elif isinstance(node, ast.ImportFrom) and not node.level:
        for alias in node.names:
            yield alias.asname or alias.name, f"{node.module}.{alias.name}"


def _of(node: ast.AST, known: dict[str, str]) -> Iterator[str]:
    if isinstance(node, ast.Import | ast.ImportFrom):
        names = [whole for _, whole in _imported(node)]
        yield from (f"imports {one}" for one in names if one.split(".")[0] in UNSAFE_MODULES)
        yield from (f"imports {one}" for one in names if one in NEVER or one == "builtins")
    elif isinstance(node, ast.Name) and node.id in BUILTINS and known.get(node.id) is None:
        yield f"builtin {node.id}"
    elif isinstance(node, ast.Attribute):
        name = _name(node, known)
        if name in NEVER or name.startswith(("os.exec", "os.spawn")):
            yield name
    elif isinstance(node, ast.Call):
        yield from _called(node, known)


def _called(node: ast.Call, known: dict[str, str]) -> Iterator[str]:
    called = _name(node.func, known)
    words = {k.arg: k.value.value for k in node.keywords if isinstance(k.value, ast.Constant)}
    given = {k.arg for k in node.keywords}
    if called == "getattr" and len(node.args) > 1 and isinstance(node.args[1], ast.Constant):
        hidden = f"{_name(node.args[0], known)}.{node.args[1].value}"
        if hidden in NEVER | MAYBE | {f"builtins.{one}" for one in BUILTINS}:
            yield f"hides {hidden}"
    if called in NEVER:
        yield called
    if called == "torch.load" and words.get("weights_only") is not True:
        yield "torch.load without weights_only=True"
    if called.startswith("yaml.") and called.endswith("load") and called != "yaml.safe_load":
        yield called
    if "allow_pickle" in given and words.get("allow_pickle") is not False:
        yield f"{called} with allow_pickle"
    if "shell" in given and words.get("shell") is not False:
        yield "shell=True"
    if "trust_remote_code" in given and words.get("trust_remote_code") is not False:
        yield "trust_remote_code=True"
    if called.endswith(".extractall") and words.get("filter") != "data":
        yield 'extractall without filter="data"'


def _name(node: ast.AST, known: dict[str, str]) -> str:
    """The dotted name of what is called, its first part as it was imported."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    first = known.get(node.id, node.id) if isinstance(node, ast.Name) else "?"
    return ".".join([first, *reversed(parts)])
