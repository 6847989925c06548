"""hydra_tune under the libraries that people already use, a folder each; imports all of hydra_tune.

hugging_face, lightning_trainer     trainers whose model trains in a pool
optuna_runner, ray_tune             searches whose trials share a pool
ray_node                            the process on a node of Ray's that has the pool
frameworks                          what several of these need, because trials run side by side in one process
Imports point down only. A library is imported when its folder is used: nobody needs them all.
"""
