//! The drive's life.

use larder_base::ByteSize;
use larder_policy::budget::WriteBudgetConfig;
use serde::Serialize;

use crate::Refused;

/// The drive's endurance and how long it should last: the write budget.
#[derive(Clone, Debug, PartialEq, clap::Args, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct DriveLife {
    /// Rated endurance of the drive in terabytes written: sets the write budget [default: none, writes are not limited]
    #[arg(long, value_name = "TB", help_heading = "Drive life", allow_negative_numbers = true)]
    pub endurance_tbw: Option<f64>,
    /// Rated endurance in drive writes per day over the warranty, instead of terabytes written
    #[arg(
        long,
        value_name = "N",
        help_heading = "Drive life",
        visible_alias = "dwpd",
        allow_negative_numbers = true
    )]
    pub endurance_dwpd: Option<f64>,
    /// Years of warranty that --endurance-dwpd is stated for
    #[arg(
        long,
        value_name = "N",
        help_heading = "Drive life",
        default_value_t = WriteBudgetConfig::default().warranty_years,
        allow_negative_numbers = true
    )]
    pub endurance_warranty_years: f64,
    /// Capacity of the whole drive, to which --endurance-dwpd refers [default: the flash given to the cache]
    #[arg(long, value_name = "SIZE", help_heading = "Drive life")]
    pub drive_capacity: Option<ByteSize>,
    /// Years that the drive should last
    #[arg(
        long,
        value_name = "N",
        help_heading = "Drive life",
        visible_alias = "years",
        default_value_t = WriteBudgetConfig::default().years,
        allow_negative_numbers = true
    )]
    pub endurance_years: f64,
    /// Bytes that the drive is expected to program on NAND for each byte written to it
    #[arg(
        long,
        value_name = "RATIO",
        help_heading = "Drive life",
        default_value_t = WriteBudgetConfig::default().device_write_amplification,
        allow_negative_numbers = true
    )]
    pub device_write_amplification: f64,
    /// Hours of write budget that may be saved up for a burst
    #[arg(
        long,
        value_name = "HOURS",
        help_heading = "Drive life",
        default_value_t = WriteBudgetConfig::default().burst_hours,
        allow_negative_numbers = true
    )]
    pub burst_hours: f64,
    /// Hold an empty cache to the write budget, and objects to admission too, instead of letting it fill once ahead of them
    #[arg(long = "no-first-fill", action = clap::ArgAction::SetFalse, help_heading = "Drive life")]
    pub first_fill: bool,
}

impl Default for DriveLife {
    fn default() -> DriveLife {
        crate::defaults()
    }
}

impl DriveLife {
    /// The write budget.
    ///
    /// # Errors
    /// A number that cannot be meant, or endurance stated twice.
    pub fn budget(&self) -> Result<WriteBudgetConfig, Refused> {
        // Every range is written so that NaN falls outside it.
        let ranged = |key, x: f64, low: f64, high: f64| {
            let must = || format!("must be between {low} and {high}");
            if x >= low && x <= high { Ok(x) } else { Err(Refused::new(key, x, must())) }
        };
        let tbw = match self.endurance_tbw {
            Some(t) if t > 0.0 && t <= 1e7 => Some(ByteSize((t * 1e12) as u64)),
            Some(t) => {
                let must = "must be a positive number of terabytes";
                return Err(Refused::new("endurance-tbw", t, must));
            }
            None => None,
        };
        if let (Some(_), Some(d)) = (tbw, self.endurance_dwpd) {
            let why = "give either endurance-tbw or endurance-dwpd, not both";
            return Err(Refused::new("endurance-dwpd", d, why));
        }
        if let Some(d) = self.endurance_dwpd
            && !(d > 0.0 && d <= 1000.0)
        {
            let must = "must be a positive number of drive writes per day, at most 1000";
            return Err(Refused::new("endurance-dwpd", d, must));
        }
        let (warranty, amplification) =
            (self.endurance_warranty_years, self.device_write_amplification);
        Ok(WriteBudgetConfig {
            tbw,
            dwpd: self.endurance_dwpd,
            years: ranged("endurance-years", self.endurance_years, 0.01, 100.0)?,
            warranty_years: ranged("endurance-warranty-years", warranty, 0.01, 100.0)?,
            drive_capacity: self.drive_capacity.unwrap_or(ByteSize(0)),
            device_write_amplification: ranged(
                "device-write-amplification",
                amplification,
                1.0,
                100.0,
            )?,
            burst_hours: ranged("burst-hours", self.burst_hours, 0.01, 720.0)?,
            first_fill: self.first_fill,
        })
    }
}
