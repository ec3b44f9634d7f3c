"""Jobs as Python objects, which the commands use too."""
