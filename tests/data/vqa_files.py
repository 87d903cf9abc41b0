"""Files of VQA in the official formats with a few questions, for tests."""

import json
from pathlib import Path

from overt.data import vqa
from overt.data.vqa import V2, VqaEdition

# question id, photo, question, ten answers, answer type, question type
TRAIN = [
    (100, 9, "what color is it", ["red"] * 7 + ["blue"] * 3, "other", "what color"),
    (101, 9, "is it red", ["yes"] * 10, "yes/no", "is it"),
    (110, 11, "how many", ["2"] * 4 + ["3"] * 3 + ["two"] * 2 + ["4"], "number", "how many"),
    (120, 12, "is it big", ["yes"] * 6 + ["no"] * 4, "yes/no", "is it"),
]
VAL = [
    (500, 50, "what is it", ["dog"] * 10, "other", "what is"),
    (501, 51, "is it blue", ["no"] * 9 + ["yes"], "yes/no", "is it"),
]


def make_question(row: tuple, part: str | None) -> dict:
    found = {"image_id": row[1], "question": row[2], "question_id": row[0]}
    return found if part is None else {**found, "coco_split": part}


def make_annotation(row: tuple, part: str | None) -> dict:
    answers = [
        {"answer": answer, "answer_confidence": "yes", "answer_id": number + 1}
        for number, answer in enumerate(row[3])
    ]
    found = {
        "question_type": row[5],
        "multiple_choice_answer": max(row[3], key=row[3].count),
        "answers": answers,
        "image_id": row[1],
        "answer_type": row[4],
        "question_id": row[0],
    }
    return found if part is None else {**found, "coco_split": part}


def dump_json(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


def write_vqa(root: Path, write_photo, edition: VqaEdition = V2, train: list = TRAIN) -> Path:
    """Write the official files with a few questions, and their photos."""
    folder = root / vqa.FOLDER
    if edition.wrapped:
        for part, rows in (("train2014", train), ("val2014", VAL)):
            questions = {
                "info": {},
                "task_type": "Open-Ended",
                "data_type": "mscoco",
                "license": {},
            }
            questions["questions"] = [make_question(row, None) for row in rows]
            annotations = {"info": {}, "annotations": [make_annotation(row, None) for row in rows]}
            dump_json(folder / edition.questions_file.format(part=part), questions)
            dump_json(folder / edition.annotations_file.format(part=part), annotations)
        test_questions = {"questions": [make_question(VAL[0], None)]}
        for part in ("test2015", "test-dev2015"):
            dump_json(folder / edition.questions_file.format(part=part), test_questions)
    else:
        for part, rows, where in (("train", train, "val2014"), ("test", VAL, "train2014")):
            questions = [make_question(row, where) for row in rows]
            dump_json(folder / edition.questions_file.format(part=part), questions)
            annotations = [make_annotation(row, where) for row in reversed(rows)]
            dump_json(folder / edition.annotations_file.format(part=part), annotations)
    for photo in (9, 11, 12, 50, 51):
        for part in ("train2014", "val2014", "test2015"):
            name = f"{part}/COCO_{part}_{photo:012d}.jpg"
            write_photo(root / vqa.PHOTOS / name, (6, 8), 4 * photo)
    return folder
