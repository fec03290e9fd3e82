//! Room in Unix sockets.

use std::os::fd::AsFd;

/// What a unix socket may hold of what was sent and not read yet, bytes; the kernel takes twice that. By default it is less
/// than a large reply takes, and whoever sends one waits for its reader in the middle of it.
const UNIX_ROOM: usize = 512 << 10;

/// Gives a unix socket room for several large messages, as far as the system allows it.
pub fn make_room(socket: &impl AsFd) {
    // Where it is refused there is as much room as by default.
    let _ = rustix::net::sockopt::set_socket_send_buffer_size(socket, UNIX_ROOM);
}
