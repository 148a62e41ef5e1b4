"""Publishing from trainers: transformers (a callback) and TRL (a weight transfer)."""
