//! Devices, shared memory, rings and clocks beneath the servers.
