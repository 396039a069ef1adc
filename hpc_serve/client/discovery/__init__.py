"""Which replicas a service has, and how a client waits for one."""
