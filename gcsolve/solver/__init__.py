"""Every method behind one contract (`base.py`); a new one is one file and one line in `registry.py`."""
