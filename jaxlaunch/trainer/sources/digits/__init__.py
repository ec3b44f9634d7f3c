"""The digits of scikit-learn as a builder of tensorflow-datasets."""
