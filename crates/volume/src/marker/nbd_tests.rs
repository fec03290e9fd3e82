use std::time::Duration;

use larder_format::block::marker::COPY_BYTES;

use super::nbd::NbdMedium;
use super::place::Place;
use super::place_tests::{marker, read, there};
use super::{Found, MarkerIoError, MarkerPlace, PlaceOptions};
use crate::nbd::{Manner, Server, locked};
use crate::{Peer, Timeouts};

fn options() -> PlaceOptions {
    let timeout = Timeouts {
        connect: Duration::from_secs(2),
        silence: Duration::from_secs(1),
        give_up: Some(Duration::from_secs(2)),
    };
    PlaceOptions { timeout, ..PlaceOptions::default() }
}

fn place(server: &Server) -> Place<NbdMedium> {
    Place::new(NbdMedium::new(server.uri(), None, &options()))
}

#[test]
fn a_marker_is_written_durably_read_and_removed() {
    for multi_conn in [true, false] {
        let server = Server::start(1 << 20, Manner { multi_conn, ..Manner::default() });
        let mut place = place(&server);
        assert!(!place.is_fenced() && place.describe().contains("disk"));
        assert_eq!(read(&mut place), Found::Absent { was: false });
        for number in 1..4 {
            let flushes = locked(&server.state).flushes;
            place.write(&marker(number)).unwrap();
            let state = locked(&server.state);
            let copy = marker(number).encode();
            assert!(state.disk[..COPY_BYTES] == copy && state.disk[COPY_BYTES..8192] == copy);
            assert!(state.durable >= 2 || state.flushes >= flushes + 2, "each copy by itself");
        }
        assert_eq!(read(&mut self::place(&server)), there(3));
        assert_eq!(read(&mut place), there(3));
        place.remove().unwrap();
        assert!(locked(&server.state).disk.iter().all(|&b| b == 0));
        assert_eq!(read(&mut place), Found::Absent { was: false });
    }
}

#[test]
fn an_export_with_other_data_is_left_as_it_is() {
    let server = Server::start(1 << 20, Manner::default());
    locked(&server.state).disk[5000] = 1;
    let mut place = place(&server);
    assert!(matches!(place.read(), Err(MarkerIoError::NotAMarker { .. })));
    assert!(place.write(&marker(1)).is_err() && place.remove().is_err());
    assert_eq!(locked(&server.state).disk.iter().filter(|&&b| b != 0).count(), 1);
    // What lies behind the copies is nobody's business here.
    let server = Server::start(1 << 20, Manner::default());
    locked(&server.state).disk[8192..].fill(1);
    let mut place = self::place(&server);
    read(&mut place);
    place.write(&marker(1)).unwrap();
    place.remove().unwrap();
    assert!(locked(&server.state).disk[8192..].iter().all(|&b| b == 1));
}

#[test]
fn an_export_that_is_too_small_or_the_volumes_own_is_no_place() {
    let server = Server::start(4096, Manner::default());
    let error = place(&server).read().unwrap_err().to_string();
    assert!(error.contains("4096") && error.contains("8192"), "{error}");
    let server = Server::start(1 << 20, Manner::default());
    let own = Peer::of(&server.uri()).unwrap();
    let error = Place::new(NbdMedium::new(server.uri(), own, &options())).read().unwrap_err();
    assert!(error.to_string().contains("own store"), "{error}");
}

#[test]
fn a_server_that_is_away_is_unreachable_and_then_found_again() {
    let server = Server::start(1 << 20, Manner::default());
    let mut place = place(&server);
    read(&mut place);
    place.write(&marker(1)).unwrap();
    server.vanish();
    let error = place.read().unwrap_err();
    assert!(matches!(error, MarkerIoError::Unreachable { .. }), "{error:?}");
    let error = self::place(&server).read().unwrap_err();
    assert!(matches!(error, MarkerIoError::Unreachable { .. }), "{error:?}");
    assert!(matches!(place.write(&marker(2)), Err(MarkerIoError::Unread { .. })));
    server.listen();
    assert_eq!(read(&mut place), there(1));
    // It hangs: whoever waits is told.
    server.behave(|manner| manner.silent = true);
    let error = place.write(&marker(2)).unwrap_err();
    assert!(matches!(error, MarkerIoError::Unreachable { .. }), "{error:?}");
    server.behave(|manner| manner.silent = false);
    place.write(&marker(3)).unwrap();
    assert_eq!(read(&mut place), there(3));
}

#[test]
fn connections_that_break_do_no_harm() {
    let server = Server::start(1 << 20, Manner { breaks: Some(5), ..Manner::default() });
    let mut place = place(&server);
    read(&mut place);
    for number in 1..20 {
        place.write(&marker(number)).unwrap();
    }
    assert_eq!(read(&mut place), there(19));
}

#[test]
fn another_holders_marker_is_not_overwritten() {
    let server = Server::start(1 << 20, Manner { multi_conn: true, ..Manner::default() });
    let (mut one, mut other) = (place(&server), place(&server));
    read(&mut one);
    read(&mut other);
    other.write(&marker(1)).unwrap();
    assert!(matches!(one.write(&marker(2)), Err(MarkerIoError::Changed { .. })));
    assert_eq!(read(&mut one), there(1));
}

#[test]
fn an_export_that_cannot_be_flushed_is_no_place_for_a_new_marker() {
    let server = Server::start(1 << 20, Manner::default());
    let put = |number| {
        let mut place = place(&server);
        read(&mut place);
        place.write(&marker(number)).map_err(|error| error.to_string())
    };
    put(1).unwrap();
    // One that is there already is gone on with.
    server.behave(|manner| manner.unflushed = true);
    put(2).unwrap();
    let mut there_is = place(&server);
    assert_eq!(read(&mut there_is), there(2));
    there_is.remove().unwrap();
    let refused = put(3).unwrap_err();
    assert!(refused.contains("offers no FLUSH") && refused.contains("disk"), "{refused}");
}
