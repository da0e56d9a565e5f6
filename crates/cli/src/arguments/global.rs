//! Options of every command, and arguments that several commands share.

use std::marker::PhantomData;
use std::path::PathBuf;

use clap::builder::PossibleValuesParser;
use clap::{Args, ValueEnum};
use vmseal_api::request_id::RequestId;

use crate::rows::Row;

/// Options of every command.
#[derive(Args, Clone)]
pub struct Global {
    /// The server's address (`https://HOST:PORT`); `vmseal login` saves it
    #[arg(
        long,
        global = true,
        env = "VMSEAL_SERVER",
        hide_env_values = true,
        value_name = "URL",
        help_heading = "Global"
    )]
    pub server: Option<String>,
    /// The file with the certificate of the server's authority (`ca.pem`, PEM)
    #[arg(
        long,
        global = true,
        env = "VMSEAL_CA",
        hide_env_values = true,
        value_name = "FILE",
        help_heading = "Global"
    )]
    pub ca: Option<PathBuf>,
    /// The file with the access token
    #[arg(
        long,
        global = true,
        env = "VMSEAL_TOKEN_FILE",
        hide_env_values = true,
        value_name = "FILE",
        help_heading = "Global"
    )]
    pub token_file: Option<PathBuf>,
    /// The request id that logs, tasks and events carry [default: a new one]
    #[arg(
        long,
        global = true,
        env = "VMSEAL_REQUEST_ID",
        hide_env_values = true,
        value_name = "ID",
        help_heading = "Global"
    )]
    pub request_id: Option<RequestId>,
    /// How to print results: `table` for people, `json` or `yaml` as the API has them, `csv` for programs
    #[arg(
        short,
        long,
        global = true,
        value_enum,
        default_value_t,
        value_name = "FORMAT",
        hide_possible_values = true,
        help_heading = "Global"
    )]
    pub output: Output,
}

impl Global {
    /// The options from the environment alone.
    pub fn from_environment() -> Self {
        Self {
            server: std::env::var("VMSEAL_SERVER").ok(),
            ca: std::env::var_os("VMSEAL_CA").map(PathBuf::from),
            token_file: std::env::var_os("VMSEAL_TOKEN_FILE").map(PathBuf::from),
            request_id: None,
            output: Output::default(),
        }
    }
}

/// How results are printed.
#[derive(Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum Output {
    /// For people.
    #[default]
    Table,
    /// For programs: the API's own documents.
    Json,
    /// The same as YAML.
    Yaml,
    /// The table for programs: plain numbers, empty fields for unknown values.
    Csv,
}

/// Which columns of a list are printed.
#[derive(Args)]
#[group(skip)]
pub struct Columns<T: Row> {
    #[arg(
        short,
        long,
        value_name = "COLUMN,...",
        value_delimiter = ',',
        value_parser = PossibleValuesParser::new(T::names()),
        default_values = T::usual_names(),
        hide_default_value = true,
        help = columns_help::<T>(),
    )]
    pub columns: Vec<String>,
    /// Leave out the header
    #[arg(long, visible_alias = "no-headers")]
    pub no_header: bool,
    #[arg(skip)]
    of: PhantomData<T>,
}

fn columns_help<T: Row>() -> String {
    let usual = T::usual_names().join(",");
    format!("The columns of the table or CSV, in this order [default: {usual}]")
}

impl<T: Row> Columns<T> {
    /// The default columns.
    pub fn usual() -> Self {
        let columns = T::usual_names().into_iter().map(str::to_owned).collect();
        Self { columns, no_header: false, of: PhantomData }
    }
}

/// How a list is printed.
#[derive(Args)]
#[group(skip)]
pub struct List<T: Row> {
    #[command(flatten)]
    pub columns: Columns<T>,
    /// Stay, and print what is added, changed or removed; Ctrl-C ends it
    #[arg(short, long)]
    pub watch: bool,
}

/// Which resource is shown, and how.
#[derive(Args)]
#[group(skip)]
pub struct Show {
    /// Name or id
    #[arg(value_name = "NAME")]
    pub name: String,
    /// Stay, and print a line for every change until it is removed
    #[arg(short, long)]
    pub watch: bool,
}

/// A resource by its name or id.
#[derive(Args)]
pub struct Name {
    /// Name or id
    #[arg(value_name = "NAME")]
    pub name: String,
}
