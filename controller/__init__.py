"""Who runs a training: engines, the train loop, the SQL text, the embedded cluster, loaders and the command line."""
