//! Every trace reader on arbitrary bytes: the first byte chooses the format, or leaves it to detection.
#![no_main]

use std::io::Cursor;

use larder_trace::{Format, Options, read};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    let Some((&first, rest)) = data.split_first() else { return };
    let format = Format::ALL.get(usize::from(first)).copied();
    for skip_bad in [false, true] {
        let options = Options { format, skip_bad, pages: (first & 1 == 1).then_some(4096), ..Options::default() };
        if let Ok(trace) = read("fuzz", Box::new(Cursor::new(rest.to_vec())), None, &options) {
            // A short record may stand for any number of requests; a bounded look at each is enough.
            for request in trace.reader.take(10_000) {
                let _ = request;
            }
        }
    }
});
