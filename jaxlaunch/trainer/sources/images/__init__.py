"""Sources of images in folders, lists, tars and tables, which are read in place."""
