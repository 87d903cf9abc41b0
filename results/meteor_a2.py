"""Compute METEOR 1.5, the Java program, of Flickr8k captions decoded with five beams.

    python results/meteor_a2.py DATA OUT.json runs/a2-flickr8k [MORE_RUNS ...]

Runs report METEOR of words and stems, which needs no Java and is lower; numbers to compare with a
paper should come from this script. Earlier results of other rows in the file are preserved.
"""

import json
import sys
from pathlib import Path

import numpy as np

from overt.data.captions import flickr8k
from overt.metrics.captions import meteor_java, tokenize_caption


def main() -> None:
    """Score the finished runs below these folders, one row and seed at a time."""
    data, out, *folders = map(Path, sys.argv[1:])
    photos = flickr8k(data, "test").photos
    references = {
        f"flickr8k/{one.photo}": list(map(tokenize_caption, one.captions)) for one in photos
    }
    found = json.loads(out.read_text()) if out.is_file() else {}
    for path in sorted(one for place in folders for one in place.glob("*/seed-*/samples.npz")):
        results = json.loads((path.parent / "results.json").read_text())
        if results["status"] != "done":
            continue
        with np.load(path) as samples:
            ids, texts = samples["id"].tolist(), samples["prediction"].tolist()
        whole, _ = meteor_java(
            [tokenize_caption(one) for one in texts], [references[one] for one in ids]
        )
        key = f"{path.parent.parent.name}/{path.parent.name}"
        cider = results["ours"]["cider_d"]["value"]
        found[key] = {"meteor_java": round(whole, 5), "cider_d": round(cider, 5)}
        print(key, found[key], flush=True)
        out.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
