"""What trials share as threads of one process: forks, Ctrl-C, garbage. Imports `errors` alone."""
