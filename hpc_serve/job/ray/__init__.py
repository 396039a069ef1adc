"""Ray on the nodes of a run: how it is started and told what to do, which nodes it has, which logs are kept."""
