"""What trials share as threads of one process: forks, locks on files, Ctrl-C, garbage. Imports `errors` alone."""
