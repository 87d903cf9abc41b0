"""METEOR 1.5 itself, by Java, of the captions that runs on Flickr8k wrote by five beams.

    python benchmarks/meteor_a2.py DATA OUT.json runs/a2-flickr8k [MORE_RUNS ...]

A run tells METEOR by words and stems, which needs no Java and is lower; numbers beside a paper's
should come from here. What was found before for other rows stays in the file.
"""

import json
import sys
from pathlib import Path

import numpy as np

from overt.data.captions import flickr8k
from overt.measure.captions import caption_words, meteor_java


def main() -> None:
    """Score the finished runs below these folders, a row and a seed at a time."""
    data, out, *places = map(Path, sys.argv[1:])
    photos = flickr8k(data, "test").photos
    said = {f"flickr8k/{one.photo}": list(map(caption_words, one.captions)) for one in photos}
    found = json.loads(out.read_text()) if out.is_file() else {}
    for path in sorted(one for place in places for one in place.glob("*/seed-*/samples.npz")):
        results = json.loads((path.parent / "results.json").read_text())
        if results["status"] != "done":
            continue
        with np.load(path) as samples:
            ids, texts = samples["id"].tolist(), samples["prediction"].tolist()
        whole, _ = meteor_java([caption_words(one) for one in texts], [said[one] for one in ids])
        key = f"{path.parent.parent.name}/{path.parent.name}"
        cider = results["ours"]["cider_d"]["value"]
        found[key] = {"meteor_java": round(whole, 5), "cider_d": round(cider, 5)}
        print(key, found[key], flush=True)
        out.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
