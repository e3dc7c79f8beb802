"""
ReCoRD (arXiv 1810.12885) as SuperGLUE gives it: the span of a news text that fills @placeholder in a sentence. --from also takes the original files,
train.json and dev.json.

    python data/record/prepare.py [--from DIR]
"""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from data.fetch import prepare


def convert(source, target):
    """SuperGLUE's lines are the articles of the original file."""
    text = source.read_text(encoding="utf-8")
    target.write_text(text if source.suffix == ".json" else '{"data": [' + ",\n".join(line for line in text.split("\n") if line.strip()) + "]}", encoding="utf-8")


if __name__ == "__main__":
    prepare("record", __doc__, [("https://dl.fbaipublicfiles.com/glue/superglue/data/v2/ReCoRD.zip", None)],
            {"train.json": ["train.jsonl", "train.json"], "dev.json": ["val.jsonl", "dev.json"]}, convert)
