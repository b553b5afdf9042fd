"""A whole run: from its settings to an adapter, or a model, on disk; its folder, resumption, export and import."""
