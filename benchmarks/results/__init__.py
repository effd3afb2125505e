"""The evidence for the learned controller: what is measured (`run.py`), kept (`docs/results`), and written up."""
