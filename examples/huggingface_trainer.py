"""A small BERT that grows while the Trainer of Hugging Face trains it; needs `pip install -e ".[huggingface]"`.

python examples/huggingface_trainer.py FOLDER      # checkpoints and the grown model
"""

import sys
from pathlib import Path

import torch
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments, set_seed

import esper
from esper.integrations.huggingface import GrowthCallback

WORDS, LENGTH = 16, 10


def sentences(count, seed):
    """Whether the first word comes again later: a question for attention."""
    words = torch.randint(0, WORDS, (count, LENGTH), generator=torch.Generator().manual_seed(seed))
    labels = (words[:, 1:] == words[:, :1]).any(1).long()
    return [{"input_ids": row, "labels": label} for row, label in zip(words, labels, strict=True)]


def collate(rows):
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def main(folder, epochs=16):
    set_seed(0)
    config = BertConfig(
        vocab_size=WORDS, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=LENGTH, num_labels=2, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    model = BertForSequenceClassification(config)
    train, held_out = sentences(1024, 0), sentences(256, 1)
    growth = GrowthCallback(
        slots=["bert.encoder.layer.*"],
        validate=DataLoader(held_out, batch_size=128, collate_fn=collate),
        controller="small",
        rent=0.0,  # accuracy at any size
    )
    arguments = TrainingArguments(
        folder, num_train_epochs=epochs, per_device_train_batch_size=64, gradient_accumulation_steps=2,
        learning_rate=0.003, save_strategy="epoch", save_total_limit=1, use_cpu=True,
        report_to=[], disable_tqdm=True, logging_strategy="no",
    )  # fmt: skip
    trainer = Trainer(model, arguments, data_collator=collate, train_dataset=train, callbacks=[growth])
    trainer.train(resume_from_checkpoint=any(Path(folder).glob("checkpoint-*")) or None)

    grown = growth.grown
    print(f"{grown.validation.accuracy:.1f} % with {grown.parameters:,} parameters")
    for seed in grown.history.seeds():
        print(seed.slot, seed.blueprint, seed.fate.name, "-", seed.why_ended)

    trainer.save_model(f"{folder}/grown")  # as ever; then the host by its own keys, and the seeds
    again = esper.load_seeds(BertForSequenceClassification.from_pretrained(f"{folder}/grown"), f"{folder}/grown")
    batch = collate(held_out)
    with torch.no_grad():
        gap = (again.eval()(**batch).logits - model.eval()(**batch).logits).abs().max()
    print(f"reloaded: outputs differ by {gap:.1g}")
    return grown


if __name__ == "__main__":
    main(*sys.argv[1:2])
