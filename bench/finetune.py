"""
Speed of fine-tuning against other people's code, with equal shapes, data and batches (pip install transformers sentence-transformers):

    python bench/finetune.py --init_from out/mlm/last.pt                      # training on docs_sc and docs_pairs, encoding docs_ir

Training: whole optimizer steps of 32 rows, against EuroBertForSequenceClassification in the loop of a Hugging Face Trainer, which pads a batch to its
longest row. Encoding: documents a second, tokenizer included, against SentenceTransformer.encode with the same tokenizer, its default batch of 32 and mean pooling.
The two sides take turns in one process; what is quoted is the median of the ratios of pairs, with their quartiles.
"""
import argparse, sys, time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import numpy as np
import torch
import torch.nn as nn

import finetune
from data.items import Item, encode_sc, encode_text, make_batch
from data.tasks import load_task
from data.tokenizer import Tokenizer
from model import Config, load_checkpoint
from train import Team, pick_dtype


def their_config(config, **more):
    from transformers import EuroBertConfig
    return EuroBertConfig(vocab_size=config.vocab_size, hidden_size=config.n_embd, intermediate_size=config.intermediate_size, num_hidden_layers=config.n_layer,
                          num_attention_heads=config.n_head, num_key_value_heads=config.n_kv_head, max_position_embeddings=config.block_size, **more)


def padded(texts, pad):
    ids, mask = (torch.full((len(texts), max(map(len, texts))), value) for value in (pad, 0))
    for row, text in enumerate(texts):
        ids[row, :len(text)], mask[row, :len(text)] = torch.from_numpy(text), 1
    return {"input_ids": ids, "attention_mask": mask}


def training(task, config, tokenizer, m, batch_size):
    """(one step of ours, one of theirs), each on a batch given by its rows."""
    from transformers import EuroBertForSequenceClassification
    items = encode_sc(task, task.rows["train"], tokenizer, 512, [])
    model = finetune.Finetuned(config, "SC", len(task.labels))
    model.reset(None, 0)
    theirs = EuroBertForSequenceClassification(their_config(config, num_labels=len(task.labels), pad_token_id=tokenizer.pad, clf_pooling="mean"))
    optimizers = [torch.optim.AdamW(net.parameters(), 1e-4, (0.9, 0.95), 1e-5, 0.1, fused=True) for net in (model, theirs)]

    def finish(net, optimizer, loss):
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    def our_step(rows):
        batch = make_batch([items[i] for i in rows], "SC", tokenizer.pad)
        with m.autocast():
            logits = model(batch)
        finish(model, optimizers[0], finetune.summed_loss("SC", logits, batch.targets) / len(rows))

    def their_step(rows):
        batch = padded([items[i].ids for i in rows], tokenizer.pad)
        with m.autocast():
            loss = theirs(**batch, labels=torch.tensor([items[i].targets[0] for i in rows])).loss
        finish(theirs, optimizers[1], loss)

    return our_step, their_step, len(items), batch_size


def encoding(task, config, tokenizer, m, n):
    """(ours, theirs), each encodes documents given by their numbers."""
    from sentence_transformers import SentenceTransformer
    from transformers import EuroBertModel
    model = finetune.Finetuned(config, "IR", 0)
    model.reset(None, 0)

    class Module(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = EuroBertModel(their_config(config, pad_token_id=tokenizer.pad))

        def tokenize(self, texts, **_):
            return padded([encode_text(text, tokenizer, 512)[0] for text in texts], tokenizer.pad)

        preprocess = tokenize

        def forward(self, features, **_):
            with m.autocast():
                hidden = self.model(input_ids=features["input_ids"], attention_mask=features["attention_mask"]).last_hidden_state.float()
            mask = features["attention_mask"][:, :, None]
            features["sentence_embedding"] = (hidden * mask).sum(1) / mask.sum(1)
            return features

    theirs = SentenceTransformer(modules=[Module()], device="cpu")

    def our_step(numbers):
        items = [Item(i, encode_text(task.corpus[number], tokenizer, 512)[0]) for i, number in enumerate(numbers)]
        return torch.stack(finetune.outputs(model, items, m, tokenizer.pad))

    return our_step, lambda numbers: theirs.encode([task.corpus[number] for number in numbers], show_progress_bar=False), len(task.corpus), n


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--init_from", required=True, help="a checkpoint: its shape and its tokenizer")
    parser.add_argument("--tasks", default="docs_sc,docs_pairs,docs_ir", help="SC tasks are trained, IR tasks encoded")
    parser.add_argument("--pairs", type=int, default=20, help="pairs of turns")
    parser.add_argument("--steps", type=int, default=5, help="optimizer steps, or hundreds of documents, of a turn")
    parser.add_argument("--dtype", default="auto")
    args = parser.parse_args()
    args.device = "cpu"
    state = load_checkpoint(args.init_from)
    config, tokenizer, cpu = Config(**state["config"]), Tokenizer.from_dict(state["tokenizer"]), torch.device("cpu")
    m = finetune.Machine(Team(), cpu, pick_dtype(args, cpu))
    print(f"{torch.get_num_threads()} threads, {str(m.dtype)[6:]}, {config.n_layer} layers of width {config.n_embd}, medians of {args.pairs} pairs (quartiles)")
    for name in args.tasks.split(","):
        task, rng = load_task(name), np.random.default_rng(0)
        kind = encoding if task.family == "IR" else training
        *sides, n_rows, n = kind(task, config, tokenizer, m, 100 if task.family == "IR" else 32)
        seconds = []
        for turn in range(args.pairs + 1):  # the first pair warms up
            batches, pair = [rng.choice(n_rows, n, False) for _ in range(args.steps)], [0.0, 0.0]
            batches = [np.concatenate(batches)] if task.family == "IR" else batches
            for side in (0, 1) if turn % 2 else (1, 0):
                start = time.perf_counter()
                for rows in batches:
                    sides[side](rows)
                pair[side] = time.perf_counter() - start
            seconds.append(pair)
        ours, theirs = np.array(seconds[1:]).T
        low, middle, high = np.percentile(theirs / ours, [25, 50, 75])
        print(f"{name:12} {'encoding' if task.family == 'IR' else 'training'}: ours {args.steps * n / np.median(ours):,.0f} rows/s, theirs "
              f"{args.steps * n / np.median(theirs):,.0f} rows/s; ratio {middle:.2f} ({low:.2f} - {high:.2f})", flush=True)


if __name__ == "__main__":
    main()
