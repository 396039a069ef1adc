"""The shared files that say where a service is. Readers find out for themselves whether a file is still true."""
