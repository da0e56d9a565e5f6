//! The `vmseal` program: command line, server and agent.
//!
//! The reason of a failure is on standard error; `exit` has the exit codes.

mod arguments;
mod commands;
mod completion;
mod connection;
mod disk_option;
mod examples;
mod exit;
mod field;
mod first_boot;
mod help;
mod images;
mod libvirt;
mod man;
mod nic_option;
mod passphrase;
mod print;
mod rows;
mod size;
mod stream;

use std::process::ExitCode;

use clap::FromArgMatches;

fn main() -> ExitCode {
    // Before there are threads, keys or passphrases.
    let hardening = vmseal_secret::process::harden();
    completion::answer();
    let parsed = help::command().get_matches();
    let arguments = match arguments::Arguments::from_arg_matches(&parsed) {
        Ok(arguments) => arguments,
        Err(error) => error.exit(),
    };
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            print::say(format_args!("vmseal: cannot start: {error}"));
            return ExitCode::FAILURE;
        }
    };
    let ended = runtime.block_on(commands::run(arguments, hardening));
    // A read of the terminal may still be waiting in its thread; it must not hold up the exit.
    runtime.shutdown_background();
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(mut error) => {
            field::name_option(&mut error, &help::command(), &parsed);
            print::say(format_args!("vmseal: {}{}", exit::text(&error), exit::trace(&error)));
            ExitCode::from(exit::Exit::of(&error) as u8)
        }
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_command_line_is_consistent() {
        crate::help::command().debug_assert();
    }
}
