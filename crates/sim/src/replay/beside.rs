//! The streams of the machines beside shards and log: each replays alone.

use std::io::{Read, Seek};

use larder_engine::kv::node::{ReplayedApplications, ReplayedMaintenance};
use larder_engine::kv::record::{MachineReader, Replayed, RunSetup, Whose};

use super::run::Difference;
use super::{RecordFile, ReplayError};

/// A machine as it is called again.
enum Machine {
    Maintenance(Box<ReplayedMaintenance>),
    Applications(Box<ReplayedApplications>),
}

impl Machine {
    /// That of a stream, if it is one of these.
    fn of(setup: &RunSetup, stream: usize) -> Result<Option<Machine>, ReplayError> {
        Ok(match setup.whose(stream) {
            Some(Whose::Maintenance) => {
                Some(Machine::Maintenance(Box::new(ReplayedMaintenance::of(setup))))
            }
            Some(Whose::Applications) => {
                Some(Machine::Applications(Box::new(ReplayedApplications::of(setup)?)))
            }
            Some(Whose::Shard(_) | Whose::Log) | None => None,
        })
    }

    fn replay(&mut self, reader: &mut MachineReader<'_>) -> Replayed {
        match self {
            Machine::Maintenance(machine) => machine.replay(reader),
            Machine::Applications(machine) => machine.replay(reader),
        }
    }
}

/// Where a record ends.
pub(super) struct Place {
    /// Its chunk begins there in the file.
    pub(super) offset: u64,
    pub(super) payload: Vec<u8>,
    /// Bytes of the payload up to the end of the record.
    pub(super) end: usize,
}

/// Replays one stream; `each` is told after each record where it ends, its number, and the first decision that differs, and says whether
/// to go on. `None` if the stream is not of a machine beside shards and log.
pub(super) fn replay<R: Read + Seek>(
    file: &mut RecordFile<R>,
    stream: usize,
    mut each: impl FnMut(u64, &mut Place, Option<Difference>) -> bool,
) -> Result<bool, ReplayError> {
    let Some(mut machine) = Machine::of(file.setup(), stream)? else { return Ok(false) };
    let name = file.name(stream);
    let mut place = Place { offset: 0, payload: Vec::new(), end: 0 };
    let mut index = 0;
    while let Some((offset, header)) = file.chunk(stream, index, &mut place.payload)? {
        index += 1;
        (place.offset, place.end) = (offset, 0);
        let payload = place.payload.clone();
        let mut reader = MachineReader::new(&payload);
        for number in header.first..header.first + u64::from(header.records) {
            let again = machine.replay(&mut reader).map_err(|source| ReplayError::Record {
                stream: name.clone(),
                number,
                offset,
                source,
            })?;
            place.end = reader.position();
            let difference = (again.recorded != again.replayed).then(|| Difference {
                stream: name.clone(),
                record: number,
                nanos: again.nanos,
                input: again.input,
                recorded: format!("decision {:08x}", again.recorded),
                replayed: format!("decision {:08x}", again.replayed),
            });
            if !each(number, &mut place, difference) {
                return Ok(true);
            }
        }
        if reader.position() != payload.len() {
            let left = payload.len() - reader.position();
            let what = format!("{left} bytes follow the last record of the chunk");
            return Err(ReplayError::Order { offset, what });
        }
    }
    Ok(true)
}
