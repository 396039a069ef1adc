"""The shared files that say where a service is. Whether they are still true is the reader's to find out."""
