//! The live page.

use serde::Serialize;

use crate::Refused;

/// Where the live page is, and who may ask for it. (Servers differ in the default: a list says its own by
/// [`default_is`](crate::default_is).)
#[derive(Clone, Debug, Default, PartialEq, clap::Args, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct LivePage {
    /// Address of the live page and /metrics, or off
    #[arg(long, value_name = "ADDR", help_heading = "Live page")]
    pub http: Option<String>,
    /// Name by which the live page may be asked for, beside localhost and addresses; * for any. May be given several times
    #[arg(long, value_name = "NAME", help_heading = "Live page")]
    pub http_host: Vec<String>,
}

impl LivePage {
    /// HOST:PORT of the page; `None` where there is none.
    ///
    /// # Errors
    /// What is neither an address nor off.
    pub fn address<'a>(&'a self, default: &'a str) -> Result<Option<&'a str>, Refused> {
        let text = self.http.as_deref().unwrap_or(default);
        if matches!(text, "off" | "none") {
            return Ok(None);
        }
        if text.rsplit_once(':').is_none_or(|(_, port)| port.parse::<u16>().is_err()) {
            let remedy = "write HOST:PORT, such as 127.0.0.1:11280, or off";
            return Err(Refused::new("http", text, remedy));
        }
        Ok(Some(text))
    }
}
