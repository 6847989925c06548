"""hydra_tune under the search libraries that people already use; each imported only when used."""
