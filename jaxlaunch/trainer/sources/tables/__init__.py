"""Sources of tables, whose columns are features and labels."""
