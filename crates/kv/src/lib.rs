//! The memcached server: protocol, connections, workers, statistics.
