//! The server, and the login at it.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context;
use vmseal_api::model::{Host, Page};

use super::{Init, Standing};
use crate::connection::{self, Saved};

/// How long a start may take; the machine may be busy.
pub(super) const START_TIMEOUT: Duration = Duration::from_secs(90);

/// How often something that starts is asked.
pub(super) const START_POLL: Duration = Duration::from_millis(100);

impl Init {
    pub(super) fn authority_file(&self) -> PathBuf {
        self.options.places.data_dir.join("ca.pem")
    }

    fn token_file(&self) -> PathBuf {
        self.options.places.data_dir.join("admin.token")
    }

    /// Whether a server has been here before.
    pub(super) fn has_data(&self) -> bool {
        self.options.places.data_dir.join("inventory.db").exists()
    }

    /// Connects to the server, if it runs and is the one of this data directory.
    pub(super) async fn reach_server(&mut self) {
        let Ok(client) = connection::open(&self.url, &self.authority_file(), &self.token_file())
        else {
            return;
        };
        if client.get::<Page<Host>>("hosts").await.is_ok() {
            self.server = Some(client);
        }
    }

    pub(super) fn look_at_server(&self) -> anyhow::Result<Standing> {
        let data = self.options.places.data_dir.display();
        Ok(match (&self.server, self.processes.server_to_do()?) {
            (Some(_), None) => Standing::There(format!("it answers at {}", self.url)),
            (_, Some(what)) => Standing::ToDo(what),
            (None, None) => {
                let how = self.processes.how();
                Standing::ToDo(format!("start it {how} at {}, its data in {data}", self.url))
            }
        })
    }

    pub(super) async fn start_server(&mut self) -> anyhow::Result<String> {
        self.processes.start_server(self.server.is_some()).await?;
        self.server = None;
        let begun = tokio::time::Instant::now();
        loop {
            self.reach_server().await;
            if self.server.is_some() {
                return Ok(format!("it answers at {}", self.url));
            }
            self.processes.check_server()?;
            anyhow::ensure!(
                begun.elapsed() < START_TIMEOUT,
                "it does not answer at {} after {START_TIMEOUT:?}; {}",
                self.url,
                self.processes.where_logs_are()
            );
            tokio::time::sleep(START_POLL).await;
        }
    }

    fn login(&self) -> Saved {
        Saved {
            server: Some(self.url.clone()),
            ca: Some(self.authority_file()),
            token_file: Some(self.token_file()),
        }
    }

    pub(super) fn look_at_login(&self) -> anyhow::Result<Standing> {
        let file = connection::saved_path().context("there is no home directory: set HOME")?;
        let saved = connection::saved()?;
        Ok(match &saved.server {
            // Whose login at another server this is may need it.
            Some(other) if *other != self.url => {
                Standing::There(format!("kept, at another server: {other}"))
            }
            _ if saved == self.login() => Standing::There(format!("saved in {}", file.display())),
            _ => Standing::ToDo(format!("save it in {}", file.display())),
        })
    }

    pub(super) fn log_in(&mut self) -> anyhow::Result<String> {
        let file = connection::saved_path().context("there is no home directory: set HOME")?;
        connection::save(&file, &self.login())?;
        Ok(format!("saved in {}", file.display()))
    }

    /// Whether commands without options ask this server.
    pub(super) fn is_logged_in(&self) -> bool {
        connection::saved().is_ok_and(|saved| saved == self.login())
    }
}
