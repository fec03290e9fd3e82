//! `larder block`: a cache device in front of volumes.

mod create;
mod format;
mod serve;
mod store;

use crate::error::CliError;

/// Cache volumes on slow storage with local flash, served as network block devices (write-through)
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    Create(create::Args),
    Format(format::Args),
    Serve(Box<serve::Args>),
}

pub(crate) fn run(args: Args) -> Result<(), CliError> {
    match args.command {
        Command::Create(args) => {
            larder_runtime::machine::end_on_broken_pipe();
            create::run(&args)
        }
        Command::Format(args) => {
            larder_runtime::machine::end_on_broken_pipe();
            format::run(&args)
        }
        Command::Serve(args) => serve::run(&args),
    }
}

/// What the system says is random, and the time: arguments to what lies below.
fn seed() -> Result<[u8; 32], CliError> {
    let mut seed = [0u8; 32];
    std::fs::File::open("/dev/urandom")
        .and_then(|mut f| std::io::Read::read_exact(&mut f, &mut seed))
        .map_err(|e| CliError::Runtime(format!("/dev/urandom: {e}")))?;
    Ok(seed)
}
