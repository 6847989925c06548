"""What all searches and trainers need where trials run side by side in one process; imports no other integration.

A library that keeps something for the whole process is made safe here or named in a warning. Optuna and Ray are
imported late, by a trial of theirs alone.
"""
