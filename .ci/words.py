"""Count words that the project does not use any more, and fail where there are more than allowed.

    python .ci/words.py           # compare with .ci/words.txt
    python .ci/words.py --write   # lower the allowed counts to what is there

The counts only fall: a new text uses the field's words (GPU, CUDA graph, per sample, must be).
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ALLOWED = ROOT / ".ci" / "words.txt"
WORDS = {
    "card (GPU)": r"\b(?:on|a|the|one|each|per|that|CUDA) cards?\b(?! of (?:scores|results))",
    "recorded (CUDA graph)": r"\brecorded (?:steps?|training|graphs?)\b|\bof a recording\b",
    "held against": r"\bheld (?:against|to)\b",
    "told of": r"\btold (?:by|apart|of)\b|\b(?:is|are|was|were) told\b",
    "is no X": r"(?<!here )\b(?:is|are) no (?:kind|map|model|folder|one|list|number|name|such)\b",
    "one a sample": (
        r"\b(?:number|row|map|(?<!from )one|column|line|page|mask|score|thread|picture|bit) an? "
        r"(?:sample|seed|layer|head|query|word|row|image|picture|cell|process|run|GPU|card)\b"
    ),
    "a second": r"\b(?:images|samples|bytes|operations|steps|numbers) a second\b",
    "as it is": r"\b(?:stays?|taken?|left|used|called|passed on) as (?:it is|they are)\b",
    "let go": r"\blet(?:s|ting)? go\b",
    "stands beside": r"\bstands? (?:beside|there|apart|with)\b",
    "comes to its end": r"\b(?:comes?|came) to (?:its|their) end\b",
    "made anew": r"\b(?:made|written|drawn) anew\b",
    "by turns": r"\b(?:by|takes?) turns\b",
    "is refused": r"\b(?:is|are|was) refused\b",
    "those who": r"\bthose who\b",
    "rooms": r"\brooms? (?:import|of the house)\b",
}


def files() -> list[Path]:
    """Return the files whose language is checked: code, scripts, pages and templates.

    Logs are history; results/trust.md is generated from the names of tests.
    """
    places = ("overt", "docs", "*.md", "examples", "benchmarks", "results/*.py", ".ci", "Makefile")
    command = ["git", "-C", str(ROOT), "ls-files", *places]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\n")
    kinds = (".py", ".md", ".jinja", ".js", ".sh", ".sbatch", ".ci/run", "Makefile")
    skipped = ("LOG.md", "RESULTS.md", "results/trust.md", ".ci/words.py")
    return [ROOT / f for f in found if f.endswith(kinds) and not f.endswith(skipped)]


def counts() -> dict[str, int]:
    """Return the number of occurrences of each word in the project."""
    texts = [path.read_text(encoding="utf-8") for path in files() if path.is_file()]
    return {name: sum(len(re.findall(p, t)) for t in texts) for name, p in WORDS.items()}


def allowed() -> dict[str, int]:
    """Return the allowed number of occurrences of each word."""
    lines = ALLOWED.read_text().splitlines()
    return {name: int(count) for count, name in (line.split(" ", 1) for line in lines)}


if __name__ == "__main__":
    now = counts()
    if "--write" in sys.argv:
        ALLOWED.write_text("".join(f"{count} {name}\n" for name, count in now.items()))
    limits = allowed()
    wrong = {n: (c, limits.get(n, 0)) for n, c in now.items() if c > limits.get(n, 0)}
    for name, (found, limit) in wrong.items():
        print(f"'{name}' occurs {found} times, allowed are {limit}: use the field's word")
    sys.exit(bool(wrong))
