"""Every method behind one contract; a new one is one file and one line in `registry.py`."""
