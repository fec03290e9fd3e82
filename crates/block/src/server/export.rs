//! Volumes as NBD's server shows them, and what its clients ask, in the cache's words.

use std::ops::Deref;
use std::sync::Arc;

use crate::backing::Flushing;
use crate::cache::service::Command;
use crate::cache::{Volume, Volumes};
use crate::nbd::server::{self as nbd, BlockSizes, Export, ExportInfo, Exports};

/// A volume as it is exported.
#[derive(Debug)]
pub(super) struct Exported(Arc<Volume>);

impl Deref for Exported {
    type Target = Arc<Volume>;

    fn deref(&self) -> &Arc<Volume> {
        &self.0
    }
}

impl Export for Exported {
    fn info(&self) -> ExportInfo {
        let about = self.capabilities();
        ExportInfo {
            name: self.name().to_owned(),
            // Where a volume comes from is not every client's business.
            description: String::new(),
            size: about.size,
            read_only: about.read_only,
            // Of a store that cannot be flushed it would promise what nobody keeps.
            flush: about.flush != Flushing::Missing,
            trim: about.trim,
            write_zeroes: true,
            fast_zero: about.fast_zero,
            cache: self.is_cached(),
            // Sessions of one store share what a flush has to cover.
            multi_conn: true,
            block: BlockSizes {
                minimum: about.minimum.max(1),
                preferred: self.preferred(),
                maximum: about.maximum,
            },
        }
    }
}

/// What is exported.
#[derive(Debug)]
pub(super) struct Catalogue<'a>(pub &'a Volumes);

impl Exports for Catalogue<'_> {
    type Export = Exported;

    fn find(&self, name: &str) -> Option<Arc<Exported>> {
        self.0.find(name).map(|volume| Arc::new(Exported(volume)))
    }

    fn list(&self) -> Vec<(String, String)> {
        self.0.all().iter().map(|v| (v.name().to_owned(), String::new())).collect()
    }
}

/// What a client asks, as the cache is asked it.
pub(super) fn command(command: nbd::Command) -> Command {
    match command {
        nbd::Command::Read { offset, buf } => Command::Read { offset, buf },
        nbd::Command::Write { offset, buf, fua } => Command::Write { offset, buf, fua },
        nbd::Command::Flush => Command::Flush,
        nbd::Command::Trim { offset, len, fua } => Command::Trim { offset, len, fua },
        nbd::Command::WriteZeroes { offset, len, fua, may_punch, fast } => {
            Command::WriteZeroes { offset, len, fua, may_punch, fast }
        }
        nbd::Command::Cache { offset, len } => Command::Advise { offset, len },
        nbd::Command::BlockStatus { offset, len, one } => Command::Status { offset, len, one },
    }
}
