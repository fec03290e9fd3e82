//! `larder block`: a cache device in front of volumes.

mod control;
mod create;
mod discard;
mod export;
mod flush;
mod format;
mod ours;
mod recover;
mod select;
mod serve;
mod settings;
mod stops;
mod store;
mod tell;
mod upkeep;
mod write;

use larder_settings::{SettingsError, WithFile};

#[cfg(test)]
pub(crate) use self::settings::Settings;
use crate::error::CliError;

/// Cache volumes on slow storage with local flash, served as network block devices (write-through, or write-back)
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    Create(create::Args),
    Format(format::Args),
    Serve(Box<WithFile<settings::Settings>>),
    Status(control::StatusArgs),
    Attach(control::AttachArgs),
    Detach(control::DetachArgs),
    Drop(control::DropArgs),
    TakeBack(control::TakeBackArgs),
    Explain(control::ExplainArgs),
    Pin(select::PinArgs),
    Never(select::NeverArgs),
    Unpin(select::UnpinArgs),
    Rules(select::RulesArgs),
    Extents(select::ExtentsArgs),
    Flush(flush::FlushArgs),
    Write(flush::WriteArgs),
    Mark(flush::MarkArgs),
    Prefetch(upkeep::PrefetchArgs),
    Check(upkeep::CheckArgs),
    Export(export::ExportArgs),
    Discard(discard::DiscardArgs),
    Recover(recover::RecoverArgs),
    Resize(upkeep::ResizeArgs),
}

pub(crate) fn run(args: Args) -> Result<(), CliError> {
    if !matches!(args.command, Command::Serve(_)) {
        larder_runtime::machine::end_on_broken_pipe();
    }
    match args.command {
        Command::Create(args) => create::run(&args),
        Command::Format(args) => format::run(&args),
        Command::Serve(list) => {
            let usage = |e: SettingsError| CliError::Usage(e.to_string());
            if list.is_printing() {
                larder_runtime::machine::end_on_broken_pipe();
                return crate::out::print(&list.printed().map_err(usage)?);
            }
            serve::run(&list.settings(&[]).map_err(usage)?)
        }
        Command::Status(args) => control::status(&args),
        Command::Attach(args) => control::attach(&args),
        Command::Detach(args) => control::detach(&args),
        Command::Drop(args) => control::drop_lines(&args),
        Command::TakeBack(args) => control::take_back(&args),
        Command::Explain(args) => control::explain(&args),
        Command::Pin(args) => select::pin(&args),
        Command::Never(args) => select::never(&args),
        Command::Unpin(args) => select::unpin(&args),
        Command::Rules(args) => select::rules(&args),
        Command::Extents(args) => select::run_extents(&args),
        Command::Flush(args) => flush::flush(&args),
        Command::Write(args) => flush::write(&args),
        Command::Mark(args) => flush::mark(&args),
        Command::Prefetch(args) => upkeep::prefetch(&args),
        Command::Check(args) => upkeep::check(&args),
        Command::Export(args) => export::export(&args),
        Command::Discard(args) => discard::run(&args),
        Command::Recover(args) => recover::run(&args),
        Command::Resize(args) => upkeep::resize(&args),
    }
}

/// What to say of a cache file that its file system has no room for.
fn will_not_fit(path: &std::path::Path, size: u64, free: u64) -> String {
    use larder_base::ByteSize;
    format!(
        "the file system of '{}' has {} free, less than the cache of {} may take: when it is full, what does not fit is \
         not cached, or the cache is given up, and volumes go on; make room, or format it with a smaller --size",
        path.display(),
        ByteSize(free),
        ByteSize(size)
    )
}

/// What the system says is random, and the time: arguments to what lies below.
fn seed() -> Result<[u8; 32], CliError> {
    larder_runtime::machine::random_bytes()
        .map_err(|e| CliError::Runtime(format!("the system gives no random numbers: {e}")))
}
