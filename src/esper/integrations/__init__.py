"""Growth inside of other people's trainers: Lightning, the Trainer of Hugging Face, Accelerate.

Each module is thin: `esper.Growth` does the work, and the trainer keeps its loop, its optimizer and its checkpoints.
What a trainer does that growth cannot follow is refused before the first update, with a line.
"""
