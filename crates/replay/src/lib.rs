//! Replays a trace against any memcached server.
