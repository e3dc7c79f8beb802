"""
MLDR, English (arXiv 2402.03216): the long document that a question was asked of, of 200,000. To test on.

    python data/mldr/prepare.py [--from DIR]
"""
import gzip, json, sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from data.fetch import prepare


def convert(source, target):
    """MLDR's lines -> BEIR's."""
    with gzip.open(source, "rt", encoding="utf-8") as lines, open(target, "w", encoding="utf-8") as out:
        if "qrels" in target.parts:
            out.write("query-id\tcorpus-id\tscore\n")
        for row in map(json.loads, lines):
            if "qrels" in target.parts:
                out.writelines(f"{row['query_id']}\t{passage['docid']}\t1\n" for passage in row["positive_passages"])
            else:
                out.write(json.dumps({"_id": row["query_id"], "text": row["query"]} if "query" in row else {"_id": row["docid"], "text": row["text"]}) + "\n")


if __name__ == "__main__":
    prepare("mldr", __doc__, [(f"https://huggingface.co/datasets/Shitao/MLDR/resolve/main/mldr-v1.0-en/{name}", None) for name in ("test.jsonl.gz", "corpus.jsonl.gz")],
            {"qrels/test.tsv": ["test.jsonl.gz"], "queries.jsonl": ["test.jsonl.gz"], "corpus.jsonl": ["corpus.jsonl.gz"]}, convert)
