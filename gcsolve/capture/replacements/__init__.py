"""The functions that are traced in place of others: `capture/substitutions.py` says which, when and why."""
