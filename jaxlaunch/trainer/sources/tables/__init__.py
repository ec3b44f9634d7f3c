"""Tables, whose columns are features and labels."""
