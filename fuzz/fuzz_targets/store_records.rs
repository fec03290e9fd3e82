//! Whatever lies in a bucket, or is given as a store's name: refused, or it holds what the rest relies on.
#![no_main]

use larder_volume::Uri;
use larder_volume::identity::{IDENTITY_BYTES, Identity};
use larder_volume::object::manifest::{Lease, MAX_CHUNKS, Manifest, TRAILER_BYTES, Trailer};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    if let Ok(manifest) = Manifest::decode(data) {
        assert!(manifest.size.div_ceil(u64::from(manifest.chunk)) <= MAX_CHUNKS);
        assert!(manifest.number().is_some());
        assert_eq!(Manifest::decode(&manifest.encode()), Ok(manifest));
    }
    if let Ok(lease) = Lease::decode(data) {
        assert_eq!(Lease::decode(&lease.encode()), Ok(lease));
    }
    if let Some((bytes, trailer)) = Trailer::check(data) {
        assert_eq!(bytes.len() + TRAILER_BYTES, data.len());
        assert_eq!(trailer.encode()[..], data[bytes.len()..]);
    }
    if let Ok(text) = std::str::from_utf8(data)
        && let Ok(uri) = text.parse::<Uri>()
    {
        assert_eq!(uri.to_string().parse::<Uri>().ok(), Some(uri));
    }
    if let Ok(then) = <&[u8; IDENTITY_BYTES]>::try_from(data) {
        let now = Identity::Blind { name: "a".into(), size: 1 };
        assert!(now.proves(then, true, false).is_err());
    }
});
